"""What the callback costs a Lightning loop per iteration between checkpoints.

    python -m benchmarks.lightning_loop

A fit of a tiny module, with our callback and without, in turns; batches of one sample that is held
in memory. Figures are processor time of the training thread from one batch to the next: of each
fit the median over ``--iterations``, so no checkpoint is in it, and of the repeats the least, since
other work on the machine can only add to it. ``added_us`` is what callback, iterator and boundary
add, ``by_hand_us`` what iterator and boundary add to a plain loop; the difference,
``callback_us``, is the callback's own.
``seeded_us`` is with our loader as it is by default, which seeds the generators for each sample:
what that adds depends on the batch size and on the workers, and belongs to the loader.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.lab.record import emit
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.examples.imagenet.models import import_torchvision
from iterators import CFIterator, ResumableDataLoader

import_torchvision()
import lightning  # noqa: E402  # needs import_torchvision() first

from checkfreq.integrations.lightning import CheckFreqCallback  # noqa: E402

ALLOWED_US = 50.0


class Tiny(lightning.LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(lightning.Callback):
    """Notes when each batch starts."""

    def __init__(self) -> None:
        self.starts_ns: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.starts_ns.append(time.thread_time_ns())

    @property
    def median_us(self) -> float:
        """The median iteration, without the first tenth."""
        starts = self.starts_ns[len(self.starts_ns) // 10 :]
        return statistics.median(b - a for a, b in pairwise(starts)) / 1e3


def main() -> None:
    """Print one line."""
    args = _arguments()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for arm in ("plain", "callback", "seeded"):
            found.setdefault(arm, []).append(fitted(arm, args))
        for arm in ("plain", "checkfreq"):
            found.setdefault(f"loop {arm}", []).append(looped(arm, args))
    least = {arm: min(medians) for arm, medians in found.items()}
    added = least["callback"] - least["plain"]
    by_hand = least["loop checkfreq"] - least["loop plain"]
    emit(
        "lightning_loop",
        folder=Path(args.folder),
        packages=("lightning",),
        arm="callback",
        iterations=args.iterations,
        repeats=args.repeats,
        plain_us=least["plain"],
        added_us=added,
        by_hand_us=by_hand,
        callback_us=added - by_hand,
        seeded_us=least["seeded"] - least["plain"],
        allowed_us=ALLOWED_US,
        met=added - by_hand <= ALLOWED_US,
    )


def fitted(arm: str, args: argparse.Namespace) -> float:
    """Microseconds per iteration of a fit."""
    clock, dataset = Clock(), TensorDataset(torch.randn(args.iterations, 4))
    loader: Any = DataLoader(dataset, batch_size=1)
    if arm == "callback":
        loader = ResumableDataLoader(dataset, 1, seed=0, seeded=())
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="lightning-") as scratch:
        ours = CheckFreqCallback(scratch, mode=CFMode.MANUAL, chk_freq=10 * args.iterations)
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[clock] if arm == "plain" else [ours, clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Tiny(), loader)
    return clock.median_us


def looped(arm: str, args: argparse.Namespace) -> float:
    """Microseconds per iteration of a loop without Lightning."""
    clock, dataset = Clock(), TensorDataset(torch.randn(args.iterations, 4))
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(batches: Iterable[Any]) -> None:
        for batch in batches:
            clock.on_train_batch_start()
            optimizer.zero_grad()
            model(batch[0]).square().mean().backward()
            optimizer.step()

    if arm == "plain":
        train(DataLoader(dataset, batch_size=1))
        return clock.median_us
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    rare = 10 * args.iterations
    with (
        tempfile.TemporaryDirectory(dir=args.folder, prefix="lightning-") as scratch,
        CFManager(scratch, chk, mode=CFMode.MANUAL, chk_freq=rare) as manager,
    ):
        loader = ResumableDataLoader(dataset, 1, seed=0, seeded=())
        train(CFIterator(loader, cf_manager=manager))
    return clock.median_us


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default=".", help="a folder on the disk to use")
    return parser.parse_args()
