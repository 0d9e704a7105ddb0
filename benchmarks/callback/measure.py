"""What our callback adds to an update of Hugging Face's Trainer, without checkpoints.

    python -m benchmarks.callback --updates 400 --rounds 8

A Trainer whose updates are as short as can be (a linear layer, a batch of two samples) trains with
and without ``CheckFreqCallback``, in random order; and so does a plain loop, with ``CFIterator``
and without. Figures are processor time of the training thread from one update to the next: of each
round the median, of the rounds the least, since other work on the machine can only add to it.
``added_us`` is what callback, loader and boundary add to the Trainer, ``by_hand_us``
what loader and boundary add to the loop; the rest, ``callback_us``, is the callback's own. The
loader's part is mostly that it seeds the generators for each sample. Expected of ``callback_us``:
at most 50 us.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.lab.record import emit
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.examples.imagenet.models import import_torchvision
from iterators import CFIterator

ALLOWED_US = 50.0


def main() -> None:
    """Print one line."""
    args = _arguments()
    logging.getLogger("checkfreq").setLevel(logging.ERROR)
    import_torchvision()  # transformers imports it if installed
    found: dict[tuple[str, bool], list[float]] = {}
    arms = [(loop, ours) for loop in ("trainer", "by hand") for ours in (False, True)]
    for _ in range(args.rounds):
        for loop, ours in random.sample(arms, len(arms)):
            train = trained if loop == "trainer" else looped
            with tempfile.TemporaryDirectory(dir=args.folder, prefix="callback-") as scratch:
                ends_s = train(Path(scratch), args.updates, ours=ours)
            found.setdefault((loop, ours), []).append(median_us(ends_s))
    least = {arm: min(medians) for arm, medians in found.items()}
    added, by_hand = (least[loop, True] - least[loop, False] for loop in ("trainer", "by hand"))
    emit(
        "callback",
        folder=Path(args.folder),
        packages=("transformers", "accelerate"),
        updates=args.updates,
        rounds=args.rounds,
        with_us=round(least["trainer", True]),
        without_us=round(least["trainer", False]),
        added_us=round(added),
        by_hand_us=round(by_hand),
        callback_us=round(added - by_hand),
        allowed_us=ALLOWED_US,
        met=added - by_hand <= ALLOWED_US,
    )


def median_us(ends_s: Sequence[float]) -> float:
    """The median time between two updates, the first tenth left out."""
    late = ends_s[len(ends_s) // 10 :]
    return 1e6 * statistics.median(b - a for a, b in itertools.pairwise(late))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--updates", type=int, default=400, help="of one training")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder", default=".", help="a folder on the disk to use")
    return parser.parse_args()


class Line(nn.Module):
    """Next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """A squared error."""
        return {"loss": (self.layer(x).squeeze(1) - labels).square().mean()}


def trained(scratch: Path, updates: int, *, ours: bool) -> list[float]:
    """When each update of a Trainer was done, in seconds of processor time."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from checkfreq.integrations.transformers import CheckFreqCallback

    class Clock(TrainerCallback):
        """Notes when an update is done."""

        ends_s: list[float]

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """See TrainerCallback."""
            self.ends_s.append(time.thread_time())

    clock = Clock()
    clock.ends_s = []
    callbacks: list[TrainerCallback] = [clock]
    if ours:
        callbacks.append(CheckFreqCallback(scratch / "chk", mode=CFMode.MANUAL, chk_freq=0))
    args = TrainingArguments(
        output_dir=str(scratch / "out"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        num_train_epochs=1,
        per_device_train_batch_size=2,
    )
    Trainer(Line(), args, train_dataset=_data(updates), callbacks=callbacks).train()
    return clock.ends_s


def looped(scratch: Path, updates: int, *, ours: bool) -> list[float]:
    """The same of a plain loop over the same data."""
    model = Line()
    optimizer = torch.optim.AdamW(model.parameters())
    ends_s: list[float] = []

    def train(batches: Iterable[dict[str, Tensor]]) -> None:
        for batch in batches:
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            ends_s.append(time.thread_time())

    plain: Any = DataLoader(_data(updates), batch_size=2, shuffle=True)
    if not ours:
        train(plain)
        return ends_s
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with CFManager(scratch / "chk", chk, mode=CFMode.MANUAL, chk_freq=0) as manager:
        train(CFIterator(plain, cf_manager=manager))
    return ends_s


def _data(updates: int) -> Any:
    return [{"x": torch.ones(2), "labels": torch.tensor(1.0)}] * (2 * updates)
