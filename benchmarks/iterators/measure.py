"""What it costs to resume in the middle of an epoch, and what the resumable order costs.

    python -m benchmarks.iterators [--only resume order cost throughput]

* ``resume``: from building the loader to the first batch after 0.1, 50 and 99.9 % of an epoch,
  beside torchdata's ``StatefulDataLoader``, accelerate's ``skip_first_batches`` and DALI's own
  checkpoints (`benchmarks.iterators.resuming`).
* ``order``: ids per second from the sampler, in batches of 256.
* ``cost``: the cost of a position, of a batch's ledger, and of requesting and seeding a sample.
* ``throughput``: images per second of a loader with checkfreq, against the same loader without
  (`benchmarks.iterators.loading`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader

from benchmarks.iterators.loading import measure_throughput
from benchmarks.iterators.resuming import measure_resume
from benchmarks.iterators.resuming_shared import BATCH, Numbers
from benchmarks.lab.record import emit
from iterators import CFIterator, EpochOrder, Ledger, ResumableDataLoader
from iterators.order.batch_requests import BatchRequestSampler, Share


def main() -> None:
    """Print a line per arm and setting."""
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="iterators-") as scratch:
        for part in args.only:
            PARTS[part](args, Path(scratch))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000_000, 1_000_000_000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ids", type=int, default=2_000_000, help="to draw per repeat")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of epochs to compare")
    parser.add_argument("--images", type=int, default=400, help="of the throughput's epochs")
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    return parser.parse_args()


def measure_order(args: argparse.Namespace, scratch: Path) -> None:
    """Measure millions of ids per second, as requests and as plain blocks."""
    for n in args.samples:
        count = min(args.ids, n)
        rates = [
            count / seconds_of(lambda n=n, count=count: draw(n, count)) / 1e6
            for _ in range(args.repeats)
        ]
        emit(
            "iterators",
            what="order",
            arm="checkfreq",
            n=n,
            batch=BATCH,
            million_ids_per_s=round(statistics.median(rates), 2),
            slowest=round(min(rates), 2),
            allowed=10.0,
        )


def draw(n: int, count: int) -> None:
    """Draw ``count`` ids in batches from a fresh sampler."""
    batches = iter(BatchRequestSampler(EpochOrder(n, 0, 0), Share(BATCH)))
    for _ in range(count // BATCH):
        next(batches)


def measure_cost(args: argparse.Namespace, scratch: Path) -> None:
    """Measure the microseconds of each part."""
    n, calls = max(args.samples), 2_000
    iterator = CFIterator(ResumableDataLoader(Numbers(n), BATCH, shuffle=True))
    for _, _ in zip(range(3), iterator, strict=False):
        pass
    ids = np.arange(BATCH)
    size = len(json.dumps(iterator.state_dict()))
    parts: dict[str, Callable[[], object]] = {
        "state_dict": iterator.state_dict,
        "ledger of a batch": lambda: Ledger.of(ids),
    }
    for arm, call in parts.items():
        seconds = [
            seconds_of(lambda call=call: [call() for _ in range(calls)]) / calls
            for _ in range(args.repeats)
        ]
        emit(
            "iterators",
            what="cost",
            arm=arm,
            microseconds=round(statistics.median(seconds) * 1e6, 2),
            bytes=size if arm == "state_dict" else None,
        )
    measure_samples(args)


def measure_samples(args: argparse.Namespace) -> None:
    """Measure microseconds per sample in a DataLoader without workers, over free samples."""
    count = max(BATCH, args.ids // 20)
    loaders: dict[str, Callable[[], object]] = {
        "plain DataLoader": lambda: exhaust(DataLoader(Numbers(count), BATCH, shuffle=True)),
        "checkfreq, no generator seeded": lambda: exhaust(through_us(count, seeded=())),
        "checkfreq, torch's seeded": lambda: exhaust(through_us(count, seeded=("torch",))),
        "checkfreq, all three seeded": lambda: exhaust(
            through_us(count, seeded=("torch", "python", "numpy"))
        ),
    }
    rounds = [{arm: seconds_of(run) for arm, run in loaders.items()} for _ in range(args.repeats)]
    for arm in loaders:
        seconds = statistics.median(each[arm] for each in rounds)
        emit("iterators", what="sample", arm=arm, microseconds=round(seconds / count * 1e6, 3))


def through_us(count: int, *, seeded: tuple[str, ...]) -> CFIterator:
    """A fresh iterator."""
    return CFIterator(ResumableDataLoader(Numbers(count), BATCH, shuffle=True, seeded=seeded))


def exhaust(batches: object) -> None:
    """One epoch."""
    for _ in batches:  # type: ignore[attr-defined]
        pass


def seconds_of(call: Callable[[], object]) -> float:
    """How long the call takes."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


PARTS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "resume": measure_resume,
    "order": measure_order,
    "cost": measure_cost,
    "throughput": measure_throughput,
}
