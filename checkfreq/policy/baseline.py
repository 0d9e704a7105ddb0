"""When the iteration time T must be measured again, and the pauses that make it possible. Pure.

Every cost is measured against T, so an error of T is in every cost. T comes from clean iterations,
those that no checkpoint touched, and it fails in two ways:

- Checkpoints follow one another so closely that no iteration is clean, and T grows old.
- T has changed meanwhile, and the iterations beside checkpoints contradict it.

Either way a *pause* begins: periodic checkpoints wait until enough clean iterations have been seen.
So do those after the first, which is taken as soon as it can be.
"""

from __future__ import annotations

import math
from statistics import fmean, pstdev

from checkfreq.policy.charges import Charge
from checkfreq.policy.costs import RunCosts

#: Clean iterations of a run before its second checkpoint: as many as one is compared with on each
#: side (neighbours.py). Where intervals are short, or a cached profile makes them so, there would
#: be no others for long, and costs that share so large an error plan the next hundred iterations.
_FIRST_ITERATIONS = 8
#: Iterations without a clean one before T is measured again, and how many clean ones that takes.
#: With the two of the aftermath, a run that checkpoints at every iteration gives up 8 of 104.
_STALE_AFTER = 96
_PAUSE_ITERATIONS = 6
#: Of the clean iterations before the pause, those that still count: too few to outweigh a change
#: (estimates.py drops them altogether if the new ones differ), enough to average out noise.
_KEPT_ITERATIONS = 24
#: Iterations beside a checkpoint that are shorter than nearly all clean ones, by this part of T,
#: contradict T. The pause is as long as the window in which estimates.py looks for a change.
_SHORTER = 0.1
_CHANGED_PAUSE_ITERATIONS = 8
#: A T that is too long by less shows only in the mean of many checkpoints that seem to make
#: training faster: of so many, by so many standard errors, and by more than this part of T.
_SPEEDUPS = 20
_STANDARD_ERRORS = 1.5
_NEGLIGIBLE = 0.005


class BaselineRefresh:
    """Notices that T is out of date, and holds periodic checkpoints back while it is measured."""

    def __init__(self, costs: RunCosts) -> None:
        self._costs = costs
        self._num_touched = 0  # iterations since the last clean one
        self._num_left = 0  # clean iterations until the pause ends
        self._slowdowns: list[float] = []

    @property
    def is_pausing(self) -> bool:
        """Whether clean iterations are being waited for."""
        return self._num_left > 0

    @property
    def num_left(self) -> int:
        """How many iterations a pause lasts at least; 0 if there is none."""
        return self._num_left

    def begin(self) -> None:
        """The first checkpoint of the run has begun: others wait until T is measured."""
        self._num_left = max(0, _FIRST_ITERATIONS - self._costs.num_clean)

    def add_touched(self) -> None:
        """An iteration that a checkpoint touched has ended."""
        self._num_touched += 1

    def add_clean(self) -> None:
        """A clean iteration has ended, and ``RunCosts`` knows it."""
        self._num_touched = 0
        if self._num_left:
            self._num_left -= 1
            # At once, not after an eighth of the window: a pause has few, and costs checkpoints.
            self._costs.update_time()

    def add_beside_upload(self) -> None:
        """An iteration that only an upload touched: no measure of T, but it ends a pause.

        Otherwise checkpoints would be held back as long as the upload takes.
        """
        self._num_left = max(0, self._num_left - 1)

    def must_pause(self) -> bool:
        """Whether to withhold the checkpoint that is due; begins a pause once T is too old."""
        if not self._num_left and self._num_touched >= _STALE_AFTER:
            self._num_left = _PAUSE_ITERATIONS
            self._costs.renew_time(keep=_KEPT_ITERATIONS)
        return self._num_left > 0

    def is_contradicted_by(self, charge: Charge) -> bool:
        """Whether a settled checkpoint shows that T is wrong; if so, a pause begins."""
        # In this order: a checkpoint that shows a change says nothing about the small error.
        is_wrong = self._is_too_fast(charge) or self._seem_to_speed_up(charge)
        if is_wrong:
            self._num_left = _CHANGED_PAUSE_ITERATIONS
        return is_wrong

    def _is_too_fast(self, charge: Charge) -> bool:
        """Its iterations were shorter than nearly every clean one: T has fallen."""
        shortest_s = self._costs.short_iteration_s
        return shortest_s is not None and charge.is_faster_than((1 - _SHORTER) * shortest_s)

    def _seem_to_speed_up(self, charge: Charge) -> bool:
        """Checkpoints cannot make iterations faster: if they seem to, T is too long."""
        self._slowdowns.append(charge.capped_s - charge.stall_s)
        if len(self._slowdowns) < _SPEEDUPS:
            return False
        mean_s, spread_s = fmean(self._slowdowns), pstdev(self._slowdowns)
        self._slowdowns.clear()
        chance_s = _STANDARD_ERRORS * spread_s / math.sqrt(_SPEEDUPS)
        is_long = mean_s < -max(chance_s, _NEGLIGIBLE * (self._costs.iteration_s or 0.0))
        if is_long:
            self._costs.renew_time(keep=1)  # not 0: T stays known, whatever it is worth
        return is_long
