"""What the throughput benchmarks share: arguments, interleaved rounds, and their result lines."""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.estimate import quartiles
from benchmarks.record import emit, median_ratio

#: Seconds by the name of what was timed.
Arm = Callable[[], dict[str, float]]
Seconds = dict[str, list[float]]


def arguments(description: str) -> argparse.Namespace:
    """``--gib``, ``--rounds`` and ``--folder``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    return parser.parse_args()


def interleaved(arms: Sequence[Arm], *, rounds: int) -> Seconds:
    """Run all arms once a round, in random order; a value per round and name."""
    seconds: Seconds = {}
    shuffled, order = list(arms), random.Random(0)
    for _ in range(rounds):
        order.shuffle(shuffled)
        for arm in shuffled:
            for name, value in arm().items():
                seconds.setdefault(name, []).append(value)
    return seconds


def report(
    benchmark: str,
    description: str,
    measure: Callable[[Path, int, int], Seconds],
    *,
    baselines: Mapping[str, str],
) -> None:
    """Measure in a scratch folder; a line per arm with its ratio to each baseline, an arm."""
    args = arguments(description)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix=f"{benchmark}-") as scratch:
        seconds = measure(Path(scratch), int(args.gib * 2**30), args.rounds)
    for name, times in seconds.items():
        median_s = statistics.median(times)
        ratios = {
            f"throughput_against_{base}": round(median_ratio(seconds[arm], times), 3)
            for base, arm in baselines.items()
        }
        emit(
            benchmark,
            folder=Path(args.folder),
            arm=name,
            gib=args.gib,
            rounds=args.rounds,
            median_s=round(median_s, 4),
            gb_per_s=_gb_per_s(args.gib, median_s),
            **_spread(args.gib, times),
            **ratios,
        )


def _gb_per_s(gib: float, seconds: float) -> float:
    return round(gib * 2**30 / seconds / 1e9, 3)


def _spread(gib: float, times: Sequence[float]) -> dict[str, dict[str, float]]:
    """The quartiles, where there are several values; the longest time is the lowest rate."""
    if len(times) < 2:
        return {}
    short_s, long_s = quartiles(times)
    return {
        "low": {"median_s": round(short_s, 4), "gb_per_s": _gb_per_s(gib, long_s)},
        "high": {"median_s": round(long_s, 4), "gb_per_s": _gb_per_s(gib, short_s)},
    }
