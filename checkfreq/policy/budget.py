"""The overhead of a run: what it has cost so far, and what may still be spent. Pure.

Two books of the same payments. The totals (``overhead_s``, ``productive_s``) are what users are
told. The balance, of a token bucket (bucket.py), is what decides: it is limited in both
directions where totals are not.
"""

from __future__ import annotations

from checkfreq.policy.bucket import TokenBucket
from checkfreq.policy.frequency import boundary_share_s, steps_for

#: What may be saved up, in upper limits of one checkpoint's cost: enough for a late checkpoint to
#: be made up for, not for a burst after an hour without any.
_DEPTH = 4


class OverheadBudget:
    """Earned by productive time, spent on checkpoints, boundaries and meetings. Seconds."""

    def __init__(self, rate: float) -> None:
        self.overhead_s = 0.0
        self.productive_s = 0.0
        self._bucket = TokenBucket(rate)
        self._upper_s = 0.0  # upper limit of what the next checkpoint costs
        self._num_uncredited = 0

    @property
    def rate(self) -> float:
        """Seconds of overhead earned per productive second."""
        return self._bucket.rate

    @property
    def balance_s(self) -> float:
        """What may still be spent; less than 0 where more was."""
        return self._bucket.balance_s

    def plan_for(self, upper_s: float, *, rate: float) -> None:
        """From now on checkpoints cost at most ``upper_s``, and time earns ``rate``."""
        self._upper_s = upper_s
        self._bucket.rate = rate
        self._bucket.limit(_DEPTH * upper_s)

    # ---- earning

    def earn(self, iteration_s: float | None) -> None:
        """An iteration ended, of which T counts; those before T is known (None) count later."""
        self._num_uncredited += 1
        if iteration_s is not None:
            earned_s = self._num_uncredited * iteration_s
            self._num_uncredited = 0
            self.productive_s += earned_s
            self._bucket.earn(earned_s)

    # ---- spending

    def pay_boundary(self, cost_s: float, *, iteration_s: float | None) -> None:
        """What a boundary without a checkpoint cost: all counts, half of what is earned is kept."""
        self.overhead_s += cost_s
        self._bucket.spend(boundary_share_s(cost_s, self.rate * (iteration_s or 0.0)))

    def pay(self, cost_s: float) -> None:
        """Something else that has held training."""
        self.overhead_s += cost_s
        self._bucket.spend(cost_s)

    def reserve(self) -> float:
        """A checkpoint begins: take off what it may cost, and return it."""
        self._bucket.spend(self._upper_s)
        return self._upper_s

    def settle(self, cost_s: float, *, reserved_s: float, owed_s: float | None = None) -> None:
        """A checkpoint cost ``cost_s``, of which ``owed_s`` are taken off (None: all)."""
        self.overhead_s += cost_s
        self._bucket.spend((cost_s if owed_s is None else owed_s) - reserved_s)

    # ---- what can be afforded

    def covers_checkpoint(self, unreserved_s: float) -> bool:
        """Whether one more can be paid for.

        ``unreserved_s``: what those in flight have cost already beyond what was reserved for them.
        """
        return self.balance_s >= self._upper_s + unreserved_s

    def steps_to_checkpoint(
        self, unreserved_s: float, *, iteration_s: float | None, boundary_s: float
    ) -> int:
        """In how many iterations that is so, if nothing else happens; 0: now."""
        lacking_s = self._upper_s + unreserved_s - self.balance_s
        if lacking_s <= 0.0:
            return 0
        earned_s = self.rate * (iteration_s or 0.0)
        return steps_for(lacking_s, earned_s - boundary_share_s(boundary_s, earned_s))
