"""What AUTO costs per iteration between checkpoints, and whether its memory grows.

    python -m benchmarks.decision

The model is so small that an iteration lasts microseconds: ``weight_update()`` and ``step()`` of an
AUTO manager are compared with ``optimizer.step()``. Medians over ``--iterations``, alternating
``--repeats`` times; checkpoints affect far fewer than half of the iterations, so a median contains
none. Growth is measured over ``--long`` iterations after a warm-up: of the memory that Python
allocated (tracemalloc, in a separate pass) and of the process's anonymous pages.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.paired import Hooks
from benchmarks.lab.record import emit
from benchmarks.lab.usage import Usage
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast

ALLOWED_US = 20.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds per iteration in each repeat, and the memory growth in bytes."""

    managed_us: list[float]
    plain_us: list[float]
    python_grew_bytes: int
    process_grew_bytes: int
    stats: dict[str, Any]

    @property
    def added_us(self) -> list[float]:
        """The time that the manager added, in each repeat."""
        return [a - b for a, b in zip(self.managed_us, self.plain_us, strict=True)]


def main() -> None:
    """Print one line."""
    args = _arguments()
    torch.set_num_threads(1)
    _report(_measured(args), args)


def _measured(args: argparse.Namespace) -> Cost:
    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with (
        tempfile.TemporaryDirectory(dir=args.folder, prefix="decision-") as scratch,
        CFManager(
            Path(scratch),
            CFCheckpoint(model=model, optimizer=optimizer),
            mode=CFMode.MANUAL if args.interval else CFMode.AUTO,
            chk_freq=args.interval,
            retention=KeepLast(1),
            config=CFConfig(stop_signals=()),
        ) as manager,
    ):
        managed_us, plain_us = alternate(manager, optimizer, args)
        grown = growth(manager, args.long, warm_up=args.iterations)
        return Cost(managed_us, plain_us, *grown, manager.stats())


def _report(cost: Cost, args: argparse.Namespace) -> None:
    emit(
        "decision",
        folder=Path(args.folder),
        arm="manual" if args.interval else "auto",
        iterations=args.iterations,
        repeats=args.repeats,
        plain_us=round(statistics.median(cost.plain_us), 2),
        added_us=round(statistics.median(cost.added_us), 2),
        added_us_worst=round(max(cost.added_us), 2),
        allowed_us=ALLOWED_US,
        k=cost.stats["interval_steps"],
        checkpoints=cost.stats["num_committed"],
        long=args.long,
        python_grew_bytes=cost.python_grew_bytes,
        process_grew_bytes=cost.process_grew_bytes,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--iterations", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--long", type=int, default=100_000, help="iterations to look for growth")
    parser.add_argument("--interval", type=int, help="MANUAL with this interval instead of AUTO")
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    return parser.parse_args()


def alternate(
    manager: CFManager, optimizer: torch.optim.Optimizer, args: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Microseconds per iteration with and without the manager: a median per repeat."""
    hooks = Hooks(optimizer)

    def managed() -> None:
        manager.weight_update()
        manager.step()

    managed_us, plain_us = [], []
    for _ in range(args.repeats + 1):
        with hooks.attached():
            managed_us.append(median_us(managed, args.iterations))
            manager.end_epoch()
            manager.wait()
        plain_us.append(median_us(optimizer.step, args.iterations))
    hooks.put_back()
    return managed_us[1:], plain_us[1:]  # the first pays for start-up


def median_us(iterate: Callable[[], object], iterations: int) -> float:
    """The median time of one call, in microseconds."""
    seconds = []
    for _ in range(iterations):
        start_s = time.perf_counter()
        iterate()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds) * 1e6


def growth(manager: CFManager, iterations: int, *, warm_up: int) -> tuple[int, int]:
    """The growth of Python's memory and of the process over that many iterations, in bytes."""

    def train(count: int) -> None:
        for _ in range(count):
            manager.weight_update()
            manager.step()
        manager.wait()
        gc.collect()

    train(warm_up)
    before = Usage.of(os.getpid()).anonymous
    train(iterations)
    process_bytes = Usage.of(os.getpid()).anonymous - before
    tracemalloc.start()
    train(warm_up)
    traced = tracemalloc.get_traced_memory()[0]
    train(iterations)
    python_bytes = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    return python_bytes, process_bytes
