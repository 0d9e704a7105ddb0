"""How long a checkpoint holds training for a list of numbers in the state, packed or not."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

from benchmarks.lab.record import emit, median_ratio
from benchmarks.lab.rounds import Arm, interleaved
from checkfreq import CFCheckpoint, CFManager, CFMode


def measure_list(length: int, args: argparse.Namespace) -> None:
    """Print a line per type of number."""
    for values in ([*range(length)], [number / 7 for number in range(length)]):
        mixed = [*values[:-1], None]  # of more than one type, so it cannot be packed
        with (
            tempfile.TemporaryDirectory(dir=args.folder, prefix="scale-") as scratch,
            _manager(f"{scratch}/packed", values) as packed,
            _manager(f"{scratch}/mixed", mixed) as plain,
        ):
            arms: list[Arm] = [
                lambda one=packed: {"held_s": _held_s(one)},
                lambda one=plain: {"mixed_held_s": _held_s(one)},
            ]
            seconds = interleaved(arms, rounds=args.rounds + 1)
        later = {name: taken[1:] for name, taken in seconds.items()}
        emit(
            "scale",
            folder=args.folder,
            what="list",
            type=type(values[0]).__name__,
            length=length,
            held_ms=round(1e3 * statistics.median(later["held_s"]), 2),
            mixed_held_ms=round(1e3 * statistics.median(later["mixed_held_s"]), 2),
            held_against_mixed=round(median_ratio(later["held_s"], later["mixed_held_s"]), 3),
        )


def _manager(folder: str, values: list[Any]) -> CFManager:
    return CFManager(folder, CFCheckpoint(numbers=values), mode=CFMode.MANUAL, chk_freq=0)


def _held_s(manager: CFManager) -> float:
    manager.step()
    began_s = time.perf_counter()
    manager.save()
    held_s = time.perf_counter() - began_s
    manager.wait()
    return held_s
