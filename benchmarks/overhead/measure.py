"""The overhead of checkpoints at AUTO's interval, against training with no manager attached.

    python -m benchmarks.overhead --model resnet18 --runs 20
    python -m benchmarks.overhead --model resnet18 --sweep

A run is one model. For each bound an AUTO manager trains until its interval has converged, and then
undisturbed for ``--auto-seconds`` more; that stretch is printed (arm ``auto``) with the manager's
own figures. Then its interval k is frozen in a MANUAL manager, one per bound, and the overhead is
measured in paired windows (arm ``frozen``): rounds of a window per bound, in random order, each
between two windows in which the optimizer has no hook and nobody calls ``step()``. A window is
whole intervals plus a tail until nothing is in flight; lab/paired.py says why every cost is
counted. With ``--live`` the AUTO managers themselves are measured, deciding as they train; to them
the end of a window is the end of an epoch.

The estimate is the ratio of total times, its 95 % interval follows from the variance over rounds,
and a run continues until every half-width is at most ``--half-width`` or ``--max-seconds`` have
passed. Rounds in which *other* processes (or the hypervisor) used more of the CPU than usual are
excluded entirely, whatever they measured; ``estimate_all`` includes them. ``--sweep`` looks for the
smallest k that keeps each bound in the same way, by bisection from 1 to 2 k.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.estimate import (
    allowed_interval,
    sample,
    smallest_that_meets,
)
from benchmarks.lab.overheads import Measured, estimate_of, undisturbed_rounds
from benchmarks.lab.paired import (
    Arm,
    FrozenArm,
    LiveArm,
    LiveManager,
    Round,
    Window,
    clean_for,
    clean_window,
    passed,
    rounds,
)
from benchmarks.lab.record import emit
from benchmarks.lab.training import Loop, add_loop_options
from benchmarks.lab.warm_up import warmed_up

_OWN_FIGURES = (
    *("iteration_s", "cost_s", "persist_s", "durable_s"),
    *("predicted_overhead", "measured_overhead", "num_deferred"),
)


def main() -> None:
    """Print lines per run and bound; with ``--sweep`` also per interval tried."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    for index in range(args.runs):
        seed = args.seed + index
        loop = Loop.of(args, seed=seed)
        clean_window(loop, 10)
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="overhead-") as scratch:
            Run(loop, Path(scratch), args, number=index + 1).measure()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_loop_options(parser)
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.01, 0.035, 0.1])
    parser.add_argument("--interval", type=int, nargs="+", help="one per bound, instead of AUTO's")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--half-width", type=float, default=0.005)
    parser.add_argument("--max-seconds", type=float, default=1200.0, help="of windows, per run")
    parser.add_argument("--min-rounds", type=int, default=20)
    parser.add_argument("--window", type=int, help="fewest iterations of a window (8; live: 24)")
    parser.add_argument("--warm-up-seconds", type=float, default=60.0, help="longest, per bound")
    parser.add_argument("--auto-seconds", type=float, default=20.0, help="AUTO's own stretch")
    parser.add_argument("--sweep", action="store_true", help="also look for the smallest k")
    parser.add_argument("--live", action="store_true", help="measure AUTO itself, not a fixed k")
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    args = parser.parse_args()
    if args.interval is not None and len(args.interval) != len(args.bounds):
        parser.error("--interval: give one per bound")
    return args


@dataclass(frozen=True, slots=True)
class Target:
    """When enough rounds have been measured."""

    half_width: float
    min_rounds: int
    max_seconds: float

    @classmethod
    def of(cls, args: argparse.Namespace) -> Target:
        """From the command line."""
        return cls(args.half_width, args.min_rounds, args.max_seconds)

    def is_reached(self, done: list[Round]) -> bool:
        """Whether the interval of every arm is narrow enough, without the disturbed rounds."""
        kept = undisturbed_rounds(done)
        return len(kept) >= self.min_rounds and all(
            estimate_of(name, kept).half_width <= self.half_width for name in done[0].samples
        )


class Run:
    """One model, from AUTO's choices to the lines that evaluate them."""

    def __init__(self, loop: Loop, scratch: Path, args: argparse.Namespace, *, number: int) -> None:
        self._loop, self._scratch, self._args = loop, scratch, args
        self._rng = random.Random(args.seed + number)
        self._common = {
            "model": args.model,
            "batch": args.batch,
            "threads": args.threads,
            "run": number,
        }
        self._num_arms = 0

    def measure(self) -> None:
        """AUTO for every bound, then all intervals in the same rounds, then the sweep."""
        if self._args.live:
            self._measure_live()
            return
        chosen = self._given() or {bound: self._choose(bound) for bound in self._args.bounds}
        measured = self._frozen({str(bound): k for bound, (k, _) in chosen.items()})
        for bound, (k, reason) in chosen.items():
            self._emit("frozen", bound, measured[str(bound)], k=k, reason=reason)
        if self._args.sweep:
            for bound, (k, _) in chosen.items():
                self._sweep(bound, k)

    def _given(self) -> dict[float, tuple[int, str]]:
        pairs = zip(self._args.bounds, self._args.interval or (), strict=False)
        return {bound: (k, "given") for bound, k in pairs}

    # ---- AUTO

    def _choose(self, bound: float) -> tuple[int, str]:
        """AUTO's interval and reason, after a stretch between two clean ones."""
        with contextlib.closing(self._warmed_up(bound)) as live:
            before = live.manager.stats()["num_committed"]
            clean = [clean_for(self._loop, self._args.auto_seconds / 2)]
            window = live.stretch(passed(self._args.auto_seconds))
            clean.append(clean_for(self._loop, self._args.auto_seconds / 2))
            stats = live.manager.stats()
        self._emit_auto(bound, window, clean, stats, taken=stats["num_committed"] - before)
        return int(stats["interval_steps"]), str(stats["reason"])

    def _warmed_up(self, bound: float) -> LiveManager:
        manager = self._loop.manager(self._folder(), max_overhead=bound)
        return warmed_up(self._loop, manager, at_most_s=self._args.warm_up_seconds)

    def _emit_auto(
        self,
        bound: float,
        window: Window,
        clean: Sequence[Window],
        stats: Mapping[str, Any],
        *,
        taken: int,
    ) -> None:
        found = sample(
            seconds=window.seconds,
            iterations=window.iterations,
            covered=window.covered,
            clean_s=[each.iteration_s for each in clean],
        )
        emit(
            "overhead",
            arm="auto",
            **self._common,
            bound=bound,
            k=stats["interval_steps"],
            reason=str(stats["reason"]),
            iterations=window.covered,
            checkpoints=taken,
            mean_interval=round(window.covered / taken, 2) if taken else None,
            estimate=round(found.cost_s / found.base_s, 5),
            seconds=round(window.seconds, 1),
            **{name: stats.get(name) for name in _OWN_FIGURES},
        )

    # ---- windows

    def _measure_live(self) -> None:
        """Measure the AUTO managers themselves in windows: an epoch ends with each."""
        bounds = self._args.bounds
        with contextlib.ExitStack() as stack:
            lives = {
                str(b): stack.enter_context(contextlib.closing(self._warmed_up(b))) for b in bounds
            }
            first = {name: live.manager.stats() for name, live in lives.items()}
            length = self._args.window or 24
            arms = {name: LiveArm(live, length=length) for name, live in lives.items()}
            measured = self._windows(arms)
            last = {name: live.manager.stats() for name, live in lives.items()}
        for bound in bounds:
            before, after = first[str(bound)], last[str(bound)]
            figures = {name: after.get(name) for name in _OWN_FIGURES}
            taken = after["num_committed"] - before["num_committed"]
            steps = after["global_step"] - before["global_step"]
            self._emit(
                "live",
                bound,
                measured[str(bound)],
                k=after["interval_steps"],
                k_start=before["interval_steps"],
                mean_interval=round(steps / taken, 2) if taken else None,
                reason=str(after["reason"]),
                **figures,
            )

    def _frozen(self, intervals: Mapping[str, int]) -> dict[str, Measured]:
        """Measure fixed intervals side by side."""
        length = max(self._args.window or 8, *intervals.values())
        with contextlib.ExitStack() as stack:
            arms = {}
            for name, k in intervals.items():
                arms[name] = FrozenArm(self._loop, self._folder(), interval=k, length=length)
                stack.callback(arms[name].close)
                arms[name].warm_up()
            return self._windows(arms)

    def _windows(self, arms: Mapping[str, Arm]) -> dict[str, Measured]:
        """Measure rounds until each arm is precise enough or the time is over."""
        start_s, target, done = time.perf_counter(), Target.of(self._args), list[Round]()
        for each in rounds(self._loop, arms, self._rng):
            done.append(each)
            if target.is_reached(done) or time.perf_counter() - start_s > target.max_seconds:
                break
        seconds = time.perf_counter() - start_s
        return {
            name: Measured.of(name, done, seconds=seconds, taken=arm.taken)
            for name, arm in arms.items()
        }

    def _folder(self) -> Path:
        self._num_arms += 1
        return self._scratch / f"arm-{self._num_arms}"

    # ---- the smallest interval

    def _sweep(self, bound: float, chosen: int) -> None:
        def meets(k: int) -> bool:
            measured = self._frozen({"k": k})["k"]
            self._emit("sweep", bound, measured, k=k)
            return measured.estimate.meets(bound) and measured.is_taken

        smallest = smallest_that_meets(1, 2 * chosen, meets)
        emit(
            "overhead",
            arm="smallest",
            **self._common,
            bound=bound,
            k=chosen,
            smallest=smallest,
            allowed=None if smallest is None else allowed_interval(smallest),
            met=smallest is not None and chosen <= allowed_interval(smallest),
        )

    def _emit(self, arm: str, bound: float, measured: Measured, **fields: Any) -> None:
        found = measured.estimate
        emit(
            "overhead",
            arm=arm,
            **self._common,
            bound=bound,
            **fields,
            estimate=round(found.mean, 5),
            low=_rounded(found.low),
            high=_rounded(found.high),
            estimate_all=round(measured.estimate_all.mean, 5),
            rounds=measured.num_rounds,
            left_out=measured.num_left_out,
            foreign_cpu=round(measured.foreign, 3),
            taken=None if measured.taken is None else round(measured.taken, 3),
            iteration_ms=round(measured.iteration_s * 1e3, 2),
            seconds=round(measured.seconds, 1),
            met=found.meets(bound),
        )


def _rounded(limit: float) -> float | None:
    return round(limit, 5) if math.isfinite(limit) else None
