"""The overhead of a run: what it has cost so far, and what may still be spent. Pure.

The same payments are entered twice. Totals (``overhead_s``, ``productive_s``) are reported to users
and hold everything. The balance of a token bucket (bucket.py) decides: it is capped, and some
payments are entered in part, so that one mishap does not prevent checkpoints for hours.
"""

from __future__ import annotations

from checkfreq.policy.bucket import TokenBucket
from checkfreq.policy.frequency import boundary_share_s, steps_for

#: The cap on the balance, in expected costs of one checkpoint: enough to make up for a late
#: checkpoint, too little for a burst after an hour without any.
DEPTH = 4
#: The part of what is earned that meetings of the ranks take at most; the rest is for checkpoints.
MEETINGS_SHARE = 0.5


class OverheadBudget:
    """Earned by productive time, spent on checkpoints, boundaries and meetings. Seconds."""

    def __init__(self, rate: float) -> None:
        self.overhead_s = 0.0
        self.productive_s = 0.0
        self._bucket = TokenBucket(rate)
        self._planned_s = 0.0  # what the next checkpoint is expected to cost
        self._num_uncredited = 0
        self._owed_s = 0.0  # of meetings, not yet deducted

    @property
    def rate(self) -> float:
        """Seconds of overhead earned per productive second."""
        return self._bucket.rate

    @property
    def balance_s(self) -> float:
        """What may still be spent; less than 0 where more was."""
        return self._bucket.balance_s

    def plan_for(self, planned_s: float, *, rate: float) -> None:
        """From now on checkpoints are expected to cost ``planned_s``, and time earns ``rate``."""
        self._planned_s = planned_s
        self._bucket.rate = rate
        self._bucket.limit(DEPTH * planned_s)

    # ---- earning

    def earn(self, iteration_s: float | None) -> None:
        """An iteration ended, which earns T; while T is unknown (None) it is credited later."""
        self._num_uncredited += 1
        if iteration_s is not None:
            earned_s = self._num_uncredited * iteration_s
            self._num_uncredited = 0
            self.productive_s += earned_s
            self._bucket.earn(earned_s)
            paid_s = min(self._owed_s, MEETINGS_SHARE * self._bucket.rate * earned_s)
            self._owed_s -= paid_s
            self._bucket.spend(paid_s)

    # ---- spending

    def pay_boundary(self, cost_s: float, *, iteration_s: float | None) -> None:
        """A boundary without a checkpoint; see ``boundary_share_s`` for what it takes off."""
        self.overhead_s += cost_s
        earned_s = self._bucket.rate * (iteration_s or 0.0)
        self._bucket.spend(boundary_share_s(cost_s, earned_s))

    def pay(self, cost_s: float) -> None:
        """Something else held training for ``cost_s``."""
        self.overhead_s += cost_s
        self._bucket.spend(cost_s)

    def pay_meeting(self, cost_s: float) -> None:
        """A meeting of the ranks held training for ``cost_s``, deducted as more is earned.

        Where meetings alone cost more than is earned, checkpoints are still taken.
        """
        self.overhead_s += cost_s
        self._owed_s += cost_s

    def reserve(self) -> float:
        """A checkpoint begins: set its expected cost aside, and return that."""
        self._bucket.spend(self._planned_s)
        return self._planned_s

    def settle(self, cost_s: float, *, reserved_s: float, owed_s: float | None = None) -> None:
        """A checkpoint cost ``cost_s``, of which ``owed_s`` is deducted (None: all of it)."""
        self.overhead_s += cost_s
        self._bucket.spend((cost_s if owed_s is None else owed_s) - reserved_s)

    # ---- what can be afforded

    def covers_checkpoint(self, unreserved_s: float) -> bool:
        """Whether the balance covers one more checkpoint.

        ``unreserved_s``: by how much those in flight already exceed what was set aside for them.
        """
        return self.balance_s >= self._planned_s + unreserved_s

    def steps_to_checkpoint(
        self, unreserved_s: float, *, iteration_s: float | None, boundary_s: float
    ) -> int:
        """After how many more iterations it does, if nothing else happens; 0: it does now."""
        lacking_s = self._planned_s + unreserved_s - self.balance_s
        if lacking_s <= 0.0:
            return 0
        earned_s = self.rate * (iteration_s or 0.0)
        return steps_for(lacking_s, earned_s - boundary_share_s(boundary_s, earned_s))
