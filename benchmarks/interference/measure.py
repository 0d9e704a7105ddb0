"""How a second load changes the interval and the overhead, with a static and an adaptive interval.

An AUTO run first trains alone. Then two runs follow the same schedule: alone, beside CPU hogs and a
process that writes and syncs, alone again. ``static`` keeps the interval that the first run came to
(``--static first``: the first one chosen with ``dynamic=False`` instead). ``adaptive`` starts with
the first run's profile, and tunes. Every few seconds the run stops checkpointing, lets the work in
flight finish, and trains briefly with no manager attached: this gives the clean iteration time at
that moment, under that load. Overhead is the cost of the stretches in between over the clean times
right before and after them, so a slowdown by the load itself is not charged to checkpoints, and
every cost of a checkpoint is counted. To the manager, each such pause is the end of an epoch.

A line per arm and phase: ``iteration_ms`` clean, ``k_start`` and ``k_end``, ``checkpoints`` taken
and ``deferred``, ``overhead`` of the phase and of its second half (``_late``, with half its 95 %
interval), when tuning has had time. A line per arm with its ``trace``, on the run's time axis:
``phases`` [name, start, end], ``intervals`` [second, k] at each change, ``overheads`` [second,
overhead of the last ``width_s``].
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.lab.estimate import Sample, Stretch, estimate, sample, sliding
from benchmarks.lab.load import Load
from benchmarks.lab.paired import LiveManager, clean_for, clean_window, passed
from benchmarks.lab.record import emit
from benchmarks.lab.training import Loop, add_loop_options
from checkfreq import CFManager

PHASES = ("alone", "second load", "alone again")


def main() -> None:
    """Run both arms and print."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="interference-") as scratch:
        folder = Path(scratch)
        settled = record("settling", folder, args).intervals[-1][1]
        traces = [record(arm, folder, args, settled=settled) for arm in ("static", "adaptive")]
    for trace in traces:
        report(trace, args)
        report_trace(trace, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add_loop_options(parser)
    parser.add_argument("--bound", type=float, default=0.035)
    parser.add_argument("--interval", type=int, help="instead of AUTO's, in both arms")
    parser.add_argument("--static", choices=("settled", "first"), default="settled")
    parser.add_argument("--settle", type=float, default=40.0, help="seconds before both arms")
    parser.add_argument("--phase", type=float, default=60.0, help="seconds of each phase")
    parser.add_argument("--stretch", type=float, default=3.0, help="seconds with checkpoints")
    parser.add_argument("--clean", type=float, default=1.0, help="seconds without, after each")
    parser.add_argument("--width", type=float, default=15.0, help="seconds of a sliding window")
    parser.add_argument("--hogs", type=int, default=1, help="processes that compute")
    parser.add_argument("--write-mib", type=int, default=256, help="written and synced at a time")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to write to")
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the schedule, on the run's time axis."""

    name: str
    start_s: float
    end_s: float
    first_k: int
    last_k: int
    checkpoints: int
    deferred: int
    iteration_s: float
    samples: list[Sample]
    own_iteration_s: float | None
    own_cost_s: float | None


@dataclass(slots=True)
class Trace:
    """The record of one arm. ``intervals``: (time, k) at each change, on the run's time axis."""

    arm: str
    phases: list[Phase] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    intervals: list[tuple[float, int]] = field(default_factory=list)

    def overhead(self, width_s: float) -> list[tuple[float, float]]:
        """Overhead against time, each over the ``width_s`` before."""
        return sliding(self.stretches, width_s=width_s)


def record(
    arm: str, folder: Path, args: argparse.Namespace, *, settled: int | None = None
) -> Trace:
    """One run of the schedule; ``settling`` only trains alone, and leaves its profile to others."""
    loop = Loop.of(args, seed=0)
    clean_window(loop, 5)
    chk_dir = folder / arm
    chk_dir.mkdir()
    if (profile := folder / "settling" / "profile.json").exists() and arm == "adaptive":
        shutil.copy(profile, chk_dir)
    kept = settled if arm == "static" and args.static == "settled" else args.interval
    manager = loop.manager(chk_dir, interval=kept, max_overhead=args.bound, dynamic=arm != "static")
    with contextlib.closing(LiveManager(loop, manager)) as live:
        live.stretch(_planned(manager, after_s=args.settle if arm == "settling" else 0.0))
        recorder = Recorder(Trace(arm), loop, live, args)
        recorder.record_interval()
        for name in PHASES if arm != "settling" else ():
            hogs, mib = (args.hogs, args.write_mib) if name == "second load" else (0, 0)
            with Load(folder, hogs=hogs, mib=mib):
                recorder.phase(name)
    return recorder.trace


def _planned(manager: CFManager, *, after_s: float) -> Callable[[], bool]:
    is_over = passed(after_s)
    return lambda: is_over() and manager.stats()["interval_steps"] is not None


class Recorder:
    """Runs phases of stretches with and without checkpoints, and records their figures."""

    def __init__(
        self, trace: Trace, loop: Loop, live: LiveManager, args: argparse.Namespace
    ) -> None:
        self.trace = trace
        self._loop, self._live, self._args = loop, live, args
        self._start_s = time.perf_counter()

    def phase(self, name: str) -> None:
        """Run one phase. It begins and ends with training that no checkpoint affects."""
        is_over = passed(self._args.phase)
        start_s, before = self._now_s(), self._live.manager.stats()
        self.record_interval()
        clean_s, samples = [self._clean_s()], list[Sample]()
        while not samples or not is_over():
            samples.append(self._stretch(clean_s))
        after = self._live.manager.stats()
        self.trace.phases.append(
            Phase(
                name=name,
                start_s=start_s,
                end_s=self._now_s(),
                first_k=before["interval_steps"],
                last_k=after["interval_steps"],
                checkpoints=after["num_committed"] - before["num_committed"],
                deferred=after["num_deferred"] - before["num_deferred"],
                iteration_s=sum(clean_s) / len(clean_s),
                samples=samples,
                own_iteration_s=after.get("iteration_s"),
                own_cost_s=after.get("cost_s"),
            )
        )

    def _stretch(self, clean_s: list[float]) -> Sample:
        """Train with checkpoints and then without; the latter is added to ``clean_s``."""
        began_s = self._now_s()
        window = self._live.stretch(passed(self._args.stretch), self.record_interval)
        ended_s = self._now_s()
        clean_s.append(self._clean_s())
        found = sample(
            seconds=window.seconds,
            iterations=window.iterations,
            covered=window.covered,
            clean_s=clean_s[-2:],
        )
        self.trace.stretches.append(Stretch(began_s, ended_s, found))
        return found

    def _clean_s(self) -> float:
        """Seconds per iteration."""
        return clean_for(self._loop, self._args.clean).iteration_s

    def record_interval(self) -> None:
        """Record the interval if it has changed."""
        k = self._live.manager.stats()["interval_steps"]
        if not self.trace.intervals or self.trace.intervals[-1][1] != k:
            self.trace.intervals.append((self._now_s(), k))

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s


def report(trace: Trace, args: argparse.Namespace) -> None:
    """A line per phase: for all of it, and for its second half, when tuning has had time."""
    for phase in trace.phases:
        settled = phase.samples[len(phase.samples) // 2 :]
        late = estimate(settled)
        emit(
            "interference",
            folder=args.folder,
            arm=trace.arm,
            phase=phase.name,
            model=args.model,
            bound=args.bound,
            static=args.static,
            seconds=round(phase.end_s - phase.start_s, 1),
            iteration_ms=round(phase.iteration_s * 1e3, 2),
            own_iteration_ms=_ms(phase.own_iteration_s),
            own_cost_ms=_ms(phase.own_cost_s),
            k_start=phase.first_k,
            k_end=phase.last_k,
            checkpoints=phase.checkpoints,
            deferred=phase.deferred,
            overhead=round(estimate(phase.samples).mean, 5),
            overhead_late=round(late.mean, 5),
            half_width_late=None if len(settled) < 3 else round(late.half_width, 5),
        )


def report_trace(trace: Trace, args: argparse.Namespace) -> None:
    """The line that is drawn: interval and overhead against time."""
    emit(
        "interference",
        folder=args.folder,
        arm=trace.arm,
        trace=True,
        model=args.model,
        bound=args.bound,
        static=args.static,
        width_s=args.width,
        phases=[[p.name, round(p.start_s, 3), round(p.end_s, 3)] for p in trace.phases],
        intervals=[[round(at_s, 3), k] for at_s, k in trace.intervals],
        overheads=[[round(at_s, 3), round(o, 5)] for at_s, o in trace.overhead(args.width)],
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 2)
