"""From the SIGKILL of a training to the end of the first update after it, in parts.

    python -m benchmarks.restarts
    python -m benchmarks.restarts --mib 1024 --rounds 3

A training with a loader of ``--workers`` processes and a state of ``--mib`` (parameters and both
moments of AdamW) checkpoints every ``--interval`` iterations. Once ``--checkpoints`` of them are
durable it waits, gets a SIGKILL, and its command is started again at once. ``seconds`` is the time
from the signal to the end of the first new update; ``parts`` add up to it: ``interpreter`` (the end
of the old process, the start of Python), the imports, ``model and loader``, ``manager`` (its
constructor), ``restore``, ``first batch`` (loader processes included), ``first update``. With
``--calls`` it says too how long some functions of ours took in it.

Arms: ``baseline``, the packages of the revision ``--baseline``; ``disk`` restores from the disk;
``memory`` from the memory of the killed process's worker; ``run`` under ``checkfreq run``, from the
disk; ``standby`` under ``checkfreq run --standby``, from the disk; ``both``. They take turns in
random order, ``--kills`` in a row with each; ``against_baseline`` is the median of the ratios to
the baseline's kill of the same number in the same round. ``met``: ``both`` take at most a third of
it; the others are not slower, which is to say that their lower quartile is not. ``first_hold``: how
long the first checkpoint of the new process held training, divided by the median of its others.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.estimate import quartiles
from benchmarks.lab.record import emit
from benchmarks.lab.results import ROOT
from benchmarks.restarts.lives import Lives, packages_at
from benchmarks.restarts.parts import Restart, medians

BASELINE = "baseline"
#: The commit before restores were streamed and workers kept their memory.
_BEFORE = "27d7c64"
_KEPT_S = "300"
_RUN = (sys.executable, "-m", "checkfreq.cli", "run")


@dataclass(frozen=True, slots=True)
class Arm:
    """How the training is started again: from what, and by whom; ``allowed`` of the baseline."""

    keeps_memory: bool = False
    under: tuple[str, ...] = ()
    allowed: float = 1.0


ARMS = {
    BASELINE: Arm(),
    "disk": Arm(),
    "memory": Arm(keeps_memory=True),
    "run": Arm(under=(*_RUN, "--")),
    "standby": Arm(under=(*_RUN, "--standby", "--")),
    "both": Arm(keeps_memory=True, under=(*_RUN, "--standby", "--"), allowed=1 / 3),
}

Found = dict[str, list[Restart]]


def main() -> None:
    """Print a line per state and arm."""
    args = _arguments()
    with tempfile.TemporaryDirectory(
        dir=args.folder, prefix="restarts-", ignore_cleanup_errors=True
    ) as scratch:
        trees = _trees(Path(scratch), args)
        for mib in args.mib:
            found = _measure(Path(scratch), mib, trees, args)
            for arm, restarts in found.items():
                _report(arm, restarts, found.get(BASELINE), mib, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=float, nargs="+", default=[85.0], help="size of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2, help="in a row, in each round and arm")
    parser.add_argument("--checkpoints", type=int, default=4, help="before each kill")
    parser.add_argument("--interval", type=int, default=8, help="iterations between checkpoints")
    parser.add_argument("--workers", type=int, default=2, help="of the loader")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--baseline", default=_BEFORE, help="the revision to compare with")
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a round before, in which sources are compiled",
    )
    parser.add_argument("--calls", action="store_true", help="time some functions of ours too")
    parser.add_argument("--limit-s", type=float, default=180.0, help="of each wait")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    return parser.parse_args()


def _trees(scratch: Path, args: argparse.Namespace) -> Mapping[str, Path]:
    """Where each arm's packages are; an arm that cannot be measured is left out, with a reason."""
    trees = dict.fromkeys(args.arms, ROOT)
    if BASELINE in trees:
        try:
            trees[BASELINE] = packages_at(args.baseline, ROOT, scratch / "revision")
        except OSError as error:
            print(f"without the baseline {args.baseline}: {error}", file=sys.stderr)
            del trees[BASELINE]
    return trees


def _measure(
    scratch: Path, mib: float, trees: Mapping[str, Path], args: argparse.Namespace
) -> Found:
    """All rounds; number 0, in which sources are compiled, does not count."""
    found: Found = {arm: [] for arm in trees}
    for number in range(0 if args.warm_up else 1, args.rounds + 1):
        for arm in random.Random(number).sample(list(trees), len(trees)):
            folder = scratch / f"{arm}-{mib:g}-{number}"
            kills = args.kills if number else 1
            restarts = _killed(folder, arm, trees[arm], mib, kills, args)
            print(f"round {number}, {arm}: {_shown(restarts)}", file=sys.stderr)
            if number:
                found[arm] += restarts
    return found


def _killed(
    folder: Path, arm: str, tree: Path, mib: float, kills: int, args: argparse.Namespace
) -> list[Restart]:
    options = ["--mib", str(mib), "--workers", str(args.workers)]
    options += ["--interval", str(args.interval), "--checkpoints", str(args.checkpoints)]
    options += ["--keep-in-memory-s", _KEPT_S if ARMS[arm].keeps_memory else "0"]
    options += ["--calls"] if args.calls else []
    lives = Lives(folder, options, tree=tree, under=ARMS[arm].under, limit_s=args.limit_s)
    with lives.begun():
        return [lives.kill() for _ in range(kills)]


def _shown(restarts: Sequence[Restart]) -> str:
    whole = ", ".join(f"{restart.seconds:.2f}" for restart in restarts)
    parts = medians([restart.parts for restart in restarts], digits=3)
    calls = medians([restart.calls for restart in restarts], digits=3)
    held = [[round(s * 1e3, 1) for s in restart.held_s] for restart in restarts]
    return f"{whole} s {parts} {calls or ''} held {held} ms"


def _report(
    arm: str,
    restarts: Sequence[Restart],
    baseline: Sequence[Restart] | None,
    mib: float,
    args: argparse.Namespace,
) -> None:
    seconds = [restart.seconds for restart in restarts]
    low, high = quartiles(seconds)
    emit(
        "restarts",
        folder=Path(args.folder),
        arm=arm,
        mib=mib,
        workers=args.workers,
        rounds=args.rounds,
        kills=args.kills,
        seconds=round(statistics.median(seconds), 3),
        low=round(low, 3),
        high=round(high, 3),
        **_against(baseline, restarts, allowed=ARMS[arm].allowed),
        parts=medians([restart.parts for restart in restarts]),
        **_calls(restarts),
        **_holds(restarts),
    )


def _against(
    baseline: Sequence[Restart] | None, restarts: Sequence[Restart], *, allowed: float
) -> dict[str, Any]:
    if baseline is None or baseline is restarts:
        return {}
    ratios = [a.seconds / b.seconds for a, b in zip(restarts, baseline, strict=True)]
    median, low = statistics.median(ratios), quartiles(ratios)[0]
    return {
        "against_baseline": round(median, 3),
        "allowed": round(allowed, 3),
        "met": (median if allowed < 1.0 else low) <= allowed,
    }


def _calls(restarts: Sequence[Restart]) -> dict[str, Any]:
    found = medians([restart.calls for restart in restarts])
    return {"calls": found} if found else {}


def _holds(restarts: Sequence[Restart]) -> dict[str, float]:
    """Milliseconds by the first checkpoint and by the others, and the median of the ratios."""
    ratios = [x.first_hold for x in restarts if x.first_hold is not None]
    if not ratios:
        return {}
    several = [x.held_s for x in restarts if len(x.held_s) > 1]
    return {
        "first_held_ms": round(1e3 * statistics.median(held[0] for held in several), 3),
        "later_held_ms": round(
            1e3 * statistics.median(statistics.median(held[1:]) for held in several), 3
        ),
        "first_hold": round(statistics.median(ratios), 3),
    }
