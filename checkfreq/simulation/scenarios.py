"""Scenarios for a tuner: traces whose costs change, and how well the interval settles.

Shared by tests/policy/test_trace_simulation.py and benchmarks/simulate/measure.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.tuner import RateTuner
from checkfreq.simulation.costs import (
    Costs,
    Noise,
    Rhythm,
    Trace,
    changing,
    smallest_interval,
    steady,
)
from checkfreq.simulation.outcome import Outcome, Taken
from checkfreq.simulation.run import simulate

_BASE = Costs(iteration_s=0.1, stall_s=0.02, copy_s=0.05, persist_s=0.3, slowdown=0.1)
_SLOW_STORAGE = replace(_BASE, persist_s=3.0)
_TWO_JOBS = replace(_BASE, iteration_s=0.2, stall_s=0.06, copy_s=0.1, persist_s=0.6)
#: A checkpoint costs next to nothing but takes long to become durable.
_CHEAP = replace(_BASE, stall_s=0.001, slowdown=0.002, persist_s=0.75)
#: Each checkpoint slows training down for a second, by a little.
_LONG = replace(_BASE, persist_s=1.0, slowdown=0.04)
_QUIET, _USUAL, _NOISY = Noise(), Noise(0.01, 0.1), Noise(0.01, 0.3)


@dataclass(frozen=True, slots=True)
class Phase:
    """A time during which ``costs`` apply (with bursts, their mean)."""

    start_s: float
    end_s: float
    costs: Costs


@dataclass(frozen=True, slots=True)
class Scenario:
    """A trace, its noise and its phases; a drift between two phases belongs to neither."""

    name: str
    trace: Trace
    phases: tuple[Phase, ...]
    noise: Noise
    end_s: float
    max_overhead: float = 0.035
    rhythm: Rhythm = field(default_factory=Rhythm)

    def tuner(self) -> RateTuner:
        """A new tuner."""
        return RateTuner(FrequencyPolicy(max_overhead=self.max_overhead))

    def run(self, seed: int, tuner: RateTuner | None = None) -> Outcome:
        """Simulate it with ``tuner``, which must be new."""
        decider = tuner or self.tuner()
        return simulate(
            self.trace,
            lambda _: decider,
            wall_s=self.end_s,
            noise=self.noise,
            rhythm=self.rhythm,
            seed=seed,
            max_overhead=self.max_overhead,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settling:
    """How the interval settled in one phase.

    oracle_steps: the smallest interval that keeps the bound and never waits.
    num_checkpoints: taken in the phase before the planned interval was within a tenth (or one
        step) of the oracle's; None: it never was.
    typical_steps: median of the planned intervals after the first 20 checkpoints.
    close_part: fraction of the planned intervals after the first 20 that are so close.
    actual_steps: mean distance of the checkpoints after the first 20.
    """

    oracle_steps: int
    num_checkpoints: int | None
    typical_steps: float
    close_part: float
    actual_steps: float


def is_close(steps: float, oracle_steps: int) -> bool:
    """Whether it is within a tenth of the oracle's interval, or one step."""
    return abs(steps - oracle_steps) <= max(1.0, 0.1 * oracle_steps)


def settlings(scenario: Scenario, outcome: Outcome) -> list[Settling]:
    """One for each phase. A phase must contain more than 20 checkpoints."""
    return [
        _settling(
            [taken for taken in outcome.taken if phase.start_s <= taken.start_s < phase.end_s],
            smallest_interval(phase.costs, max_overhead=scenario.max_overhead),
        )
        for phase in scenario.phases
    ]


def _settling(taken: Sequence[Taken], oracle_steps: int) -> Settling:
    planned = [math.inf if each.interval_steps is None else each.interval_steps for each in taken]
    close = [is_close(steps, oracle_steps) for steps in planned]
    return Settling(
        oracle_steps=oracle_steps,
        num_checkpoints=close.index(True) if True in close else None,
        typical_steps=median(planned[20:]),
        close_part=fmean(close[20:]),
        actual_steps=(taken[-1].step - taken[20].step) / (len(taken) - 21),
    )


def _drift(start_s: float, end_s: float, first: Costs, last: Costs) -> list[tuple[float, Costs]]:
    """Costs whose iteration time changes from the first to the last in a hundred steps."""
    grown_s = last.iteration_s - first.iteration_s
    return [
        (
            start_s + part * (end_s - start_s) / 100,
            replace(first, iteration_s=first.iteration_s + part / 100 * grown_s),
        )
        for part in range(1, 101)
    ]


def _steady(name: str, noise: Noise, end_s: float) -> Scenario:
    return Scenario(name, steady(_BASE), (Phase(0.0, end_s, _BASE),), noise, end_s)


def _disturbed(name: str, costs: Costs, noise: Noise, *, max_overhead: float = 0.035) -> Scenario:
    """400 s at the usual costs, 1000 s at different ones, then the usual ones again."""
    usual = _CHEAP if max_overhead > 0.035 else _BASE
    phases = (
        Phase(0.0, 400.0, usual),
        Phase(400.0, 1400.0, costs),
        Phase(1400.0, 2000.0, usual),
    )
    trace = changing([(phase.start_s, phase.costs) for phase in phases])
    return Scenario(name, trace, phases, noise, 2000.0, max_overhead)


def _drifting() -> Scenario:
    slow = replace(_BASE, iteration_s=0.2)
    up, down = _drift(300.0, 600.0, _BASE, slow), _drift(900.0, 1200.0, slow, _BASE)
    phases = (
        Phase(0.0, 300.0, _BASE),
        Phase(600.0, 900.0, slow),
        Phase(1200.0, 1500.0, _BASE),
    )
    trace = changing([(0.0, _BASE), *up, *down])
    return Scenario("drifting iteration time", trace, phases, _USUAL, 1500.0)


def _bursty() -> Scenario:
    """For 4 s of every 40 s, checkpoints cost five times as much."""
    trace = changing([(0.0, _BASE), (36.0, _BASE.times(5.0))], period_s=40.0)
    return Scenario("bursty", trace, (Phase(0.0, 2000.0, _BASE.times(1.4)),), _USUAL, 2000.0)


def _rhythmic(name: str, noise: Noise, *iterations: float) -> Scenario:
    """Iteration times that alternate; the oracle knows their mean."""
    mean = replace(_BASE, iteration_s=_BASE.iteration_s * fmean(iterations))
    phases = (Phase(0.0, 1000.0, mean),)
    return Scenario(name, steady(_BASE), phases, noise, 1000.0, rhythm=Rhythm(iterations))


def _expensive_ones() -> Scenario:
    """One checkpoint in 8 slows training down twenty times as much, to a fifth of its speed."""
    factors = (*7 * [1.0], 20.0)
    mean = replace(_LONG, slowdown=_LONG.slowdown * fmean(factors))
    phases = (Phase(0.0, 3000.0, mean),)
    name = "every 8th checkpoint is far dearer"
    rhythm = Rhythm(slowdowns=factors)
    return Scenario(name, steady(_LONG), phases, _USUAL, 3000.0, rhythm=rhythm)


def scenarios() -> tuple[Scenario, ...]:
    """All scenarios."""
    return (
        _steady("steady, no noise", _QUIET, 300.0),
        _steady("steady", _USUAL, 1000.0),
        _steady("30 % noise", _NOISY, 2000.0),
        _drifting(),
        _bursty(),
        _disturbed("storage 10x slower and back", _SLOW_STORAGE, _USUAL),
        _disturbed("a second job comes and goes", _TWO_JOBS, _USUAL),
        _disturbed(
            "bound by storage, 10x slower and back",
            replace(_CHEAP, persist_s=7.5),
            _USUAL,
            max_overhead=0.1,
        ),
        _rhythmic("two kinds of iterations in turn", _QUIET, 1.05, 0.95),
        _rhythmic("two kinds of iterations in turn, noisy", _USUAL, 1.05, 0.95),
        _rhythmic("every 4th iteration is shorter", _QUIET, 1.0, 1.0, 1.0, 0.9),
        _rhythmic("every 10th iteration is an outlier", _QUIET, *9 * [1.0], 6.0),
        _rhythmic("every 10th iteration is an outlier, noisy", _USUAL, *9 * [1.0], 6.0),
        _expensive_ones(),
    )
