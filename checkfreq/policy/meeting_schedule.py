"""When the ranks of a run meet next: often enough to coordinate, within the bound. Pure.

The ranks meet where a checkpoint may be due, and at least every ``every_s`` for stop signals and
failures. Meetings hold training, so their cost is measured and they are spaced to use only a part
of the bound: otherwise a checkpoint that is due but withheld, late or not planned yet would make
the ranks meet at every boundary. The bound takes precedence over ``every_s``, up to a factor; of
thousands of ranks up to another, since their meetings would leave nothing of it for checkpoints.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low

from checkfreq.policy.budget import MEETINGS_SHARE
from checkfreq.policy.estimates import OUTLIER

#: The part of the bound that meetings may use; the rest is for checkpoints. Chosen, not measured:
#: at the default bound of 3.5 %, a meeting of 1 ms may come every 0.11 s.
_SHARE = 0.25
#: Most boundaries between two meetings: the next one is agreed on in steps, and if iterations
#: become slower, a stop signal waits for all of them. The second limit is for the bound's sake.
_FARTHEST_STEPS = 100
_FARTHEST_APART_STEPS = 1000
#: However expensive meetings are, a stop signal is noticed within so many times ``every_s``: the
#: first, unless meetings would then use more than `MEETINGS_SHARE`, and never the second.
_LATEST, _LATEST_OF_MANY = 10.0, 60.0
#: Meetings whose lower median is the cost of one: one that waits for a slow rank does not count.
_WINDOW = 9


class MeetingSchedule:
    """Measures what meetings cost and spaces them accordingly."""

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=_WINDOW)
        self._last_steps = 0

    @property
    def cost_s(self) -> float:
        """The cost of one meeting in seconds; 0 before the first."""
        return median_low(self._costs) if self._costs else 0.0

    def met(self, seconds: float) -> float:
        """A meeting held training for ``seconds``; returns the part that is the meeting's own cost.

        A meeting that took much longer than others waited for a rank that was busy with something
        else, and training would have waited for that rank anyway. Invalid times are ignored.
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
        was ``since_last`` boundaries ago. The distance at most doubles from one meeting to the
        next, since iterations may become much slower than ``iteration_s`` meanwhile.
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
        """The distance in steps that keeps meetings within their share of the bound."""
        latest_s = min(self.cost_s / (MEETINGS_SHARE * bound), _LATEST_OF_MANY * every_s)
        apart_s = min(self.cost_s / (_SHARE * bound), max(_LATEST * every_s, latest_s))
        return math.ceil(min(apart_s / iteration_s, _FARTHEST_APART_STEPS))
