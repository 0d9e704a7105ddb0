"""``checkfreq simulate --trace``: policies replayed over a recorded run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checkfreq.cli import text
from checkfreq.errors import ConfigError
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.profile import is_amount
from checkfreq.simulation.deciders import FixedInterval
from checkfreq.simulation.recorded import read_trace
from checkfreq.simulation.retrace import (
    Replayed,
    as_recorded,
    auto,
    ideal_interval,
    policy_of,
    retrace,
)
from checkfreq.simulation.series import Series, take_apart
from checkfreq.simulation.windows import WINDOW_ITERATIONS
from checkfreq.types import Objective

_HEAD = ("POLICY", "INTERVAL", "OF IDEAL", "CHECKPOINTS", "OVERHEAD", "WORST", "LOSS", "LONGEST",
         "LATE", "WITHHELD")  # fmt: skip
_NOTES = f"""\
INTERVAL: iterations between checkpoints, median of the second half. OF IDEAL: times the smallest
fixed interval that keeps the bound here. OVERHEAD: added since the first checkpoint, by all others
and by boundaries and meetings. WORST: the most of it in any {WINDOW_ITERATIONS} iterations.
LOSS, LONGEST: work that a failure would have lost, on average and at the worst moment.
LATE, WITHHELD: checkpoints that were due and waited, for the one before or for the bound."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy, and what it would have done."""

    name: str
    done: Replayed


@dataclass(frozen=True, slots=True)
class Page:
    """All that is shown of a trace. ``ideal_steps`` None: the trace is too short for the bound."""

    series: Series
    max_overhead: float
    ideal_steps: int | None
    arms: tuple[Arm, ...]

    def times_ideal(self, done: Replayed) -> float | None:
        """The interval of ``done`` over the ideal one."""
        steps = done.interval_steps
        return None if steps is None or self.ideal_steps is None else steps / self.ideal_steps

    def to_json(self) -> Iterator[dict[str, object]]:
        """One object for the trace, then one for each arm."""
        run = self.series.recording
        yield {
            "trace": run.name,
            "run": run.run,
            "origin": dict(run.origin),
            "iterations": run.num_iterations,
            "iteration_s": self.series.iteration_s(),
            "clean_iterations": self.series.num_clean,
            "rhythm": self.series.rhythm,
            "checkpoints": len(self.series.costs),
            "cost_s": [cost.total_s for cost in self.series.costs],
            "torn_lines": run.num_torn,
            "max_overhead": self.max_overhead,
            "ideal_steps": self.ideal_steps,
        }
        for arm in self.arms:
            done = arm.done
            yield {
                "arm": arm.name,
                "interval_steps": done.interval_steps,
                "times_ideal": self.times_ideal(done),
                "planned_steps": done.planned_steps,
                "checkpoints": len(done.placed),
                "overhead": done.overhead,
                "worst_overhead": done.worst_overhead,
                "expected_loss_s": done.expected_loss_s,
                "longest_loss_s": done.longest_loss_s,
                "late": done.num_late,
                "withheld": done.num_withheld,
                "overheads": list(done.overheads),
                "placed": [[each.at, each.planned_steps] for each in done.placed],
            }

    def lines(self) -> Iterator[str]:
        """What is printed."""
        run, series = self.series.recording, self.series
        yield (
            f"{run.name}: {run.num_iterations} iterations of {_span(series.iteration_s())} without "
            f"checkpoints ({series.num_clean} were touched by none), {len(series.costs)} "
            f"checkpoints of {_span(_mean_cost_s(series))}."
        )
        for name, value in sorted(run.origin.items()):
            yield f"{name}: {value}"
        if series.rhythm > 1:
            yield f"Iterations repeat every {series.rhythm}."
        if run.num_torn:
            yield f"{run.num_torn} torn line{'s are' if run.num_torn > 1 else ' is'} left out."
        yield f"Bound: {100 * self.max_overhead:.3g} %. {self._ideal_text()}"
        yield ""
        yield text.table(_HEAD, [self._cells(arm) for arm in self.arms])
        yield ""
        yield from self._over_time()
        yield ""
        yield _NOTES

    def _ideal_text(self) -> str:
        if self.ideal_steps is None:
            return "No fixed interval keeps it in this trace: record a longer run."
        return f"Smallest fixed interval that keeps it: {self.ideal_steps} iterations."

    def _cells(self, arm: Arm) -> Sequence[str]:
        done, times = arm.done, self.times_ideal(arm.done)
        return (
            arm.name,
            "-" if done.interval_steps is None else f"{done.interval_steps:g}",
            "-" if times is None else f"{times:.2f}",
            str(len(done.placed)),
            f"{100 * done.overhead:.2f} %",
            f"{100 * done.worst_overhead:.2f} %",
            _span(done.expected_loss_s),
            _span(done.longest_loss_s),
            str(done.num_late),
            str(done.num_withheld),
        )

    def _over_time(self) -> Iterator[str]:
        """The planned interval and the overhead after each tenth."""
        num = self.series.recording.num_iterations
        ats = [(part + 1) * num // 10 for part in range(10)]
        rows = [
            [f"{arm.name}: interval", *(str(arm.done.planned_at(at) or "-") for at in ats)]
            for arm in self.arms
        ]
        rows += [
            [f"{arm.name}: overhead", *(f"{100 * each:.2f} %" for each in arm.done.overheads)]
            for arm in self.arms
        ]
        yield text.table(["AFTER ITERATION", *map(str, ats)], rows)


def replayed(
    path: Path,
    *,
    max_overhead: float | None,
    mtbf_s: float | None,
    interval_s: float | None,
    every: Sequence[int],
) -> Page:
    """Replay the recorded policy, and those that were asked for. None: as recorded, or without."""
    series = take_apart(read_trace(path))
    policy = policy_of(series)
    if max_overhead is not None:
        policy = replace(policy, max_overhead=max_overhead)
    steps = [*every, *([] if interval_s is None else [_steps(interval_s, series)])]
    ideal = ideal_interval(series, max_overhead=policy.max_overhead)
    arms = [Arm("recorded", as_recorded(series))]
    arms += [Arm(name, auto(series, each)) for name, each in _policies(policy, mtbf_s)]
    arms += [Arm(f"every {k}", retrace(series, FixedInterval(k))) for k in dict.fromkeys(steps)]
    if ideal is not None:
        arms.append(Arm("ideal", retrace(series, FixedInterval(ideal))))
    return Page(series, policy.max_overhead, ideal, tuple(arms))


def show(page: Page, *, as_json: bool) -> None:
    """Print it."""
    for line in map(json.dumps, page.to_json()) if as_json else page.lines():
        print(line)


def _policies(
    policy: FrequencyPolicy, mtbf_s: float | None
) -> Iterator[tuple[str, FrequencyPolicy]]:
    yield "auto", policy
    if mtbf_s is not None:
        yield "auto mtbf_s", replace(policy, mtbf_s=mtbf_s, objective=Objective.BOUND)
        yield "auto goodput", replace(policy, mtbf_s=mtbf_s, objective=Objective.GOODPUT)


def _steps(interval_s: float, series: Series) -> int:
    if not (is_amount(interval_s) and interval_s > 0):
        raise ConfigError(f"--interval-s: expected finite seconds > 0, got {interval_s}")
    return max(1, round(interval_s / series.iteration_s()))


def _mean_cost_s(series: Series) -> float:
    return sum(cost.total_s for cost in series.costs) / len(series.costs)


def _span(seconds: float) -> str:
    """``1.5 ms``, ``12.0 s``, ``4.2 min``."""
    if seconds < 1.0:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
