"""Keeps the interval from following the noise of its costs. Pure.

An interval is planned after every checkpoint, from estimates that are never the same twice. It
moves when the change is large, when it lasts, or when the bound is being broken; otherwise it
stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

#: A change of at most this part of the interval is taken for noise. A tenth is also how close to
#: the smallest possible interval the tuner is to settle (tests/policy/test_trace_simulation.py).
HYSTERESIS = 0.1
#: Unless so many plans in a row ask for a change in the same direction: a change of the costs that
#: is smaller but lasts must be followed within the same test's twenty checkpoints.
_LASTING = 6
#: The bound is judged over so many checkpoints: one or two expensive ones are noise.
_JUDGED = 8


class IntervalDamper:
    """Decides, for each new plan, how much of its change is made."""

    def __init__(self) -> None:
        self._direction = 0
        self._num_alike = 0  # plans in a row that asked for a change in this direction
        self._recent: deque[tuple[float, float]] = deque(maxlen=_JUDGED)  # (cost, work before it)
        self._productive_s = 0.0

    def add_checkpoint(self, cost_s: float, *, productive_s: float) -> None:
        """A checkpoint cost so much; ``productive_s`` of work have been done in the whole run."""
        self._recent.append((cost_s, productive_s - self._productive_s))
        self._productive_s = productive_s

    def steps(self, old: int, new: int, *, bound: float, cautious: Callable[[], int]) -> int:
        """The interval to adopt where ``old`` is in force and ``new`` was planned.

        ``cautious`` plans once more with costs that are higher by half of ``HYSTERESIS``, for an
        interval that is to shrink. ``bound`` is the overhead that is allowed, a fraction.
        """
        steps = self._damped(old, new, bound=bound, cautious=cautious)
        if steps != old:
            self._num_alike = 0
        return steps

    def _damped(self, old: int, new: int, *, bound: float, cautious: Callable[[], int]) -> int:
        if self._is_lasting(old, new) or (new > old and self._is_broken(bound)):
            return new
        if abs(new - old) <= HYSTERESIS * old:
            return old
        if new > old:
            return new
        # A little too long costs a little more lost work at a failure; too short breaks the bound
        # and grows again: so it shrinks only as far as slightly higher costs would let it.
        return min(old, cautious())

    def _is_lasting(self, old: int, new: int) -> bool:
        direction = (new > old) - (new < old)
        self._num_alike = self._num_alike + 1 if direction == self._direction else 1
        self._direction = direction
        return self._num_alike >= _LASTING

    def _is_broken(self, bound: float) -> bool:
        """Whether the last few checkpoints together cost more than the work between them allows."""
        cost_s = sum(cost for cost, _ in self._recent)
        productive_s = sum(productive for _, productive in self._recent)
        return cost_s > bound * productive_s
