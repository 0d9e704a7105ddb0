"""A tuner's input: iterations and checkpoints that have ended. Seconds of one clock. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from checkfreq.policy.profile import LONGEST_S, is_amount


class Iteration(NamedTuple):  # made at every iteration, at a third of a frozen dataclass's cost
    """One iteration, from boundary to boundary.

    stall_s: the part during which the manager held training, its code at the boundary included.
    overlap_s: from the boundary to the weight update.
    is_regular: False if the iteration contains other work (validation, a starting loader).
    is_quiet: False if the worker was still busy at the end.
    waited_s: the user's own waits, such as ``save(wait=True)``; no checkpoint is charged for them.
    met_s: meetings of the ranks, which are charged separately.

    ``duration_s`` includes neither ``waited_s`` nor ``met_s``.
    """

    start_s: float
    end_s: float
    stall_s: float = 0.0
    overlap_s: float | None = None
    is_regular: bool = True
    is_quiet: bool = True
    waited_s: float = 0.0
    met_s: float = 0.0

    def consistent(self) -> Iteration:
        """Limit the stall to the duration: it may exceed it since clocks are read in turn."""
        start_s, end_s, stall_s, _, _, _, waited_s, met_s = self
        whole_s = end_s - start_s - waited_s - met_s
        return self if stall_s <= whole_s else self._replace(stall_s=whole_s)

    @property
    def duration_s(self) -> float:
        """Its length, without waits of the user and meetings of the ranks."""
        return self.end_s - self.start_s - self.waited_s - self.met_s

    @property
    def moved_s(self) -> float:
        """The part of ``duration_s`` during which training was not held."""
        start_s, end_s, stall_s, _, _, _, waited_s, met_s = self
        return end_s - start_s - waited_s - met_s - stall_s

    def is_sane(self) -> bool:
        """False for NaN, and for a clock that went backwards or jumped."""
        start_s, end_s, stall_s, overlap_s, _, _, waited_s, met_s = self
        return (  # only comparisons, which are False for NaN: this runs at every iteration
            0.0 < end_s - start_s - waited_s - met_s <= LONGEST_S
            and waited_s >= 0.0
            and met_s >= 0.0
            and 0.0 <= stall_s <= LONGEST_S
            and (overlap_s is None or 0.0 <= overlap_s <= LONGEST_S)
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of a checkpoint that became durable; ``device_copy_s`` is for device snapshots only."""

    copy_s: float
    persist_s: float
    durable_s: float
    state_bytes: int
    device_copy_s: float | None = None

    def is_sane(self) -> bool:
        """False if a value is NaN, negative or impossibly large."""
        times_s = (self.copy_s, self.persist_s, self.durable_s, self.device_copy_s or 0.0)
        return is_amount(self.state_bytes) and all(0.0 <= time_s <= LONGEST_S for time_s in times_s)
