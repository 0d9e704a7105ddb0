"""Cached profiles of an earlier run, right and wrong by three times either way."""

from __future__ import annotations

import math
from dataclasses import replace

from checkfreq.policy.observations import Iteration
from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import RateTuner
from checkfreq.simulation.costs import Costs

#: By how much its costs of a checkpoint, and its iteration, differ from those of the run.
PROFILES: dict[str, tuple[float, float] | None] = {
    "none": None,
    "right": (1.0, 1.0),
    "checkpoints 3 x as dear": (3.0, 1.0),
    "checkpoints a third as dear": (1 / 3, 1.0),
    "iterations 3 x as long": (1.0, 3.0),
    "iterations a third as long": (1.0, 1 / 3),
}


def cached_profile(name: str, costs: Costs) -> Profile | None:
    """What an earlier run would have left that had ``costs`` but for the error; None: nothing."""
    found = PROFILES[name]
    if found is None:
        return None
    of_costs, of_time = found
    right = costs.profile()
    wrong = replace(right, iteration_s=of_time * right.iteration_s).with_costs_scaled(of_costs)
    return replace(wrong, durable_s=of_costs * wrong.durable_s)


class Watched(RateTuner):
    """Knows what it planned a checkpoint to cost at most, and when its cached profile was dropped.

    discarded_at: after so many iterations; infinite if it was not.
    """

    discarded_at = math.inf
    planned_s = 0.0
    _num_told = 0

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None:
        """See RateTuner."""
        profile = self.profile()
        if profile is not None:
            self.planned_s = max(self.planned_s, profile.planned_cost_s)
        super().started(attempt, step=step, start_s=start_s, is_periodic=is_periodic)

    def iteration(self, iteration: Iteration) -> None:
        """See RateTuner."""
        super().iteration(iteration)
        self._num_told += 1
        if self.cache_rejected is not None:
            self.discarded_at = min(self.discarded_at, self._num_told)
