"""When the ranks of a run meet again: soon enough to hear of one another, within the bound. Pure.

A meeting is wanted where a checkpoint may be due, and every now and then (``every_s``) for stop
signals and failures. What meetings cost is measured; they are as far apart as keeps them to a part
of the bound, so that a checkpoint that is due and withheld, late or not planned yet does not have
the ranks meet at every boundary. The bound wins over ``every_s``, but not by more than a factor.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low

from checkfreq.policy.estimates import OUTLIER

#: Of the bound, what meetings may take; the rest is for checkpoints.
_SHARE = 0.25
#: Most boundaries from one meeting to the next, since iterations may become slower; and most for
#: the sake of the bound.
_FARTHEST_STEPS = 100
_FARTHEST_APART_STEPS = 1000
#: However costly meetings are, a stop signal is heard within so many times ``every_s``.
_LATEST = 10.0
_WINDOW = 9


class MeetingSchedule:
    """What meetings cost, and how far apart they are for it."""

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=_WINDOW)
        self._last_steps = 0

    @property
    def cost_s(self) -> float:
        """What one costs, in seconds; 0 before the first."""
        return median_low(self._costs) if self._costs else 0.0

    def met(self, seconds: float) -> float:
        """A meeting held training for so long; returns what of it is the meeting's own cost.

        One that took much longer than others was waiting for a rank that had something else to do,
        which would have been waited for anyhow. A time that is no number >= 0 tells nothing.
        """
        if not 0.0 <= seconds < math.inf:
            return 0.0
        self._costs.append(seconds)
        return min(seconds, OUTLIER * self.cost_s)

    def steps(
        self,
        *,
        due_steps: int,
        iteration_s: float | None,
        every_s: float,
        since_last: int,
        bound: float,
    ) -> int:
        """How many boundaries from now the ranks meet; at least one.

        A checkpoint may be due in ``due_steps``. ``iteration_s`` None: unknown. The last meeting
        was ``since_last`` boundaries ago: iterations may become much slower, so the next one is
        not much further away than any was before.
        """
        steps = 1
        if iteration_s is not None and iteration_s > 0.0:
            often = int(min(every_s / iteration_s, _FARTHEST_STEPS))
            apart = self._apart(iteration_s, every_s=every_s, bound=bound)
            wanted = max(min(due_steps, often), apart)
            steps = min(wanted, 2 * max(since_last, self._last_steps))
        self._last_steps = max(1, steps)
        return self._last_steps

    def _apart(self, iteration_s: float, *, every_s: float, bound: float) -> int:
        """How many steps keep meetings to their part of the bound."""
        apart_s = min(self.cost_s / (_SHARE * bound), _LATEST * every_s)
        return math.ceil(min(apart_s / iteration_s, _FARTHEST_APART_STEPS))
