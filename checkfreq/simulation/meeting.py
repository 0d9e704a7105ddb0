"""Ranks that meet, in a simulation: each iteration is longer, and the decider is told why.

A simulation knows iterations and checkpoints. Meetings are made part of its iterations, at their
mean per boundary, and taken apart again in the outcome.
"""

from __future__ import annotations

from dataclasses import replace

from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import Iteration, Measured, Verdict
from checkfreq.simulation.costs import Costs
from checkfreq.simulation.deciders import Decider, Interval, NewDecider
from checkfreq.simulation.outcome import Outcome


class MeetingDecider:
    """A decider of a run whose iterations contain ``boundary_s`` of meetings."""

    def __init__(self, decider: Decider, boundary_s: float) -> None:
        self._decider = decider
        self._boundary_s = boundary_s

    @property
    def plan(self) -> Interval | None:
        """See Decider."""
        return self._decider.plan

    def profile(self) -> Profile | None:
        """See Decider."""
        return self._decider.profile()

    def iteration(self, iteration: Iteration) -> None:
        """See Decider; the meetings are told as such."""
        self._decider.met(self._boundary_s)
        self._decider.iteration(iteration._replace(met_s=self._boundary_s))

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None:
        """See Decider."""
        self._decider.started(attempt, step=step, start_s=start_s, is_periodic=is_periodic)

    def ended(self, attempt: str, *, end_s: float, measured: Measured | None) -> None:
        """See Decider."""
        self._decider.ended(attempt, end_s=end_s, measured=measured)

    def continue_from(self, step: int) -> None:
        """See Decider."""
        self._decider.continue_from(step)

    def met(self, seconds: float) -> None:
        """See Decider."""
        self._decider.met(seconds)

    def uploading(self, began_s: float, ended_s: float | None) -> None:
        """See Decider."""
        self._decider.uploading(began_s, ended_s)

    def due(self, *, step: int, now_s: float) -> Verdict:
        """See Decider."""
        return self._decider.due(step=step, now_s=now_s)


def meeting(new_decider: NewDecider, boundary_s: float) -> NewDecider:
    """Makes deciders that are told of the meetings."""
    if not boundary_s:
        return new_decider
    return lambda cached: MeetingDecider(new_decider(cached), boundary_s)


def with_meetings(costs: Costs, boundary_s: float) -> Costs:
    """The costs of a run whose iterations contain ``boundary_s`` of meetings."""
    return replace(costs, iteration_s=costs.iteration_s + boundary_s)


def without_meetings(outcome: Outcome, costs: Costs, boundary_s: float) -> Outcome:
    """The outcome of such a run: meetings are overhead, not work. ``costs`` are without them."""
    work = costs.iteration_s / (costs.iteration_s + boundary_s)
    met_s = (1 - work) * (outcome.progress_s + outcome.lost_s)
    return replace(
        outcome,
        progress_s=work * outcome.progress_s,
        lost_s=work * outcome.lost_s,
        overhead_s=outcome.overhead_s + met_s,
    )
