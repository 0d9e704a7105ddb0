"""What our callback adds to an update of Hugging Face's Trainer, without checkpoints.

    python -m benchmarks.callback --updates 400 --rounds 5

A Trainer whose updates are as short as can be (a linear layer, a batch of two samples) trains with
and without ``CheckFreqCallback``, in random order. ``median_us`` is the processor time that the
training thread takes from one update to the next, which other work on the machine does not change
much; ``added_us`` is the median over the rounds of the difference. The loaders differ too: ours
takes the place of accelerate's, and what it takes, more or less, is part of the difference.
Expected: at most 50 us.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.imagenet.models import import_torchvision
from benchmarks.lab.record import emit
from checkfreq import CFMode


def main() -> None:
    """Print one line."""
    args = _arguments()
    logging.getLogger("checkfreq").setLevel(logging.ERROR)
    import_torchvision()  # transformers imports it if installed
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(args.rounds):
        for ours in random.sample([False, True], 2):
            with tempfile.TemporaryDirectory(dir=args.folder, prefix="callback-") as scratch:
                found[ours].append(median_us(Path(scratch), args.updates, ours=ours))
    added = [one - other for one, other in zip(found[True], found[False], strict=True)]
    emit(
        "callback",
        folder=Path(args.folder),
        updates=args.updates,
        rounds=args.rounds,
        median_us=round(statistics.median(found[True])),
        without_us=round(statistics.median(found[False])),
        added_us=round(statistics.median(added)),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--updates", type=int, default=400, help="of one training")
    parser.add_argument("--rounds", type=int, default=5)
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


def median_us(scratch: Path, updates: int, *, ours: bool) -> float:
    """Microseconds between two updates, the first tenth left out."""
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
    data: Any = [{"x": torch.ones(2), "labels": torch.tensor(1.0)}] * (2 * updates)
    Trainer(Line(), args, train_dataset=data, callbacks=callbacks).train()
    ends_s = clock.ends_s[updates // 10 :]
    return 1e6 * statistics.median(b - a for a, b in itertools.pairwise(ends_s))
