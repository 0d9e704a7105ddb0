"""Compares ways to choose the interval, on the same run with the same failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from checkfreq.errors import ConfigError
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.profile import is_amount
from checkfreq.policy.tuner import RateTuner
from checkfreq.policy.waste import daly_interval_s, young_interval_s
from checkfreq.simulation.costs import Costs, smallest_interval, steady, unwaiting_interval
from checkfreq.simulation.deciders import FixedInterval, NewDecider
from checkfreq.simulation.failures import Exponential
from checkfreq.simulation.meeting import meeting, with_meetings, without_meetings
from checkfreq.simulation.outcome import Outcome
from checkfreq.simulation.run import simulate
from checkfreq.types import Objective

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to choose the interval, and its outcome.

    is_limited: storage could not keep up with the interval that was chosen, so it is longer.
    """

    name: str
    outcome: Outcome
    is_limited: bool = False

    @property
    def interval_steps(self) -> int | None:
        """The interval planned at the end."""
        return self.outcome.planned_steps


def compare(
    costs: Costs,
    *,
    mtbf_s: float,
    restart_s: float,
    max_overhead: float = 0.035,
    interval_s: float = 1800.0,
    days: float | None = None,
    seed: int = 0,
    boundary_s: float = 0.0,
) -> Iterator[Arm]:
    """Yields each arm in turn, all with the same failures. ``days`` None: enough for a thousand.

    ``boundary_s``: what meetings of the ranks add to each iteration, on average.

    ``bound``: always the smallest interval that the bound allows. ``fixed``: every
    ``interval_s``. ``young``, ``daly``: the closed forms. These three are never shorter than
    storage can keep up with. ``auto``, ``auto mtbf_s``, ``auto goodput``: checkfreq without
    ``mtbf_s``, with it, and with Objective.GOODPUT, starting from a cached profile of the costs.
    """
    wall_s = 1000 * mtbf_s if days is None else days * _DAY_S
    for name, new_decider, is_limited in choices(
        costs, mtbf_s=mtbf_s, max_overhead=max_overhead, interval_s=interval_s
    ):
        outcome = simulate(
            steady(with_meetings(costs, boundary_s)),
            meeting(new_decider, boundary_s),
            wall_s=wall_s,
            failures=Exponential(mtbf_s),
            restart_s=restart_s,
            seed=seed,
            max_overhead=max_overhead,
        )
        yield Arm(name, without_meetings(outcome, costs, boundary_s), is_limited)


def choices(
    costs: Costs, *, mtbf_s: float, max_overhead: float, interval_s: float
) -> Iterator[tuple[str, NewDecider, bool]]:
    """Each arm's name, what decides in it, and whether storage made its interval longer."""
    bound = FrequencyPolicy(max_overhead=max_overhead)
    known = FrequencyPolicy(max_overhead=max_overhead, mtbf_s=mtbf_s)
    goodput = FrequencyPolicy(max_overhead=max_overhead, mtbf_s=mtbf_s, objective=Objective.GOODPUT)
    if not (is_amount(interval_s) and interval_s > 0):
        raise ConfigError(f"interval_s: expected finite seconds > 0, got {interval_s}")
    chosen_s = {
        "fixed": interval_s,
        "young": young_interval_s(costs.cost_s, mtbf_s=mtbf_s),
        "daly": daly_interval_s(costs.cost_s, mtbf_s=mtbf_s),
    }
    yield "bound", _fixed(smallest_interval(costs, max_overhead=max_overhead)), False
    least = unwaiting_interval(costs)
    for name, seconds in chosen_s.items():
        steps = max(1, round(seconds / costs.iteration_s))
        yield name, _fixed(max(least, steps)), least > steps
    yield "auto", _auto(bound, costs), False
    yield "auto mtbf_s", _auto(known, costs), False
    yield "auto goodput", _auto(goodput, costs), False


def _fixed(steps: int) -> NewDecider:
    return lambda _: FixedInterval(steps)


def _auto(policy: FrequencyPolicy, costs: Costs) -> NewDecider:
    return lambda cached: RateTuner(policy, cached=cached or costs.profile())
