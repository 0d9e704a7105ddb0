"""What a tuner is told: iterations and checkpoints that ended. Seconds of any one clock. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from checkfreq.policy.profile import LONGEST_S, is_amount


class Iteration(NamedTuple):  # made at every iteration: a third of a frozen dataclass's cost
    """One iteration, boundary to boundary.

    stall_s: of it, what the manager held training for, its boundary code included.
    overlap_s: boundary to weight update. is_regular: False where something else is inside
    (validation, the loader's start). is_quiet: False if the worker was still busy at its end.
    waited_s: what the user chose to wait for; met_s: what meetings of the ranks held training for,
    which is charged apart. Neither is a part of its duration.
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
        """It was not held for longer than it lasted: clocks are read one after the other."""
        whole_s = self.duration_s
        return self if self.stall_s <= whole_s else self._replace(stall_s=whole_s)

    @property
    def duration_s(self) -> float:
        """Its whole length."""
        return self.end_s - self.start_s - self.waited_s - self.met_s

    def is_sane(self) -> bool:
        """False for a time that is not a number, or of a clock that went backwards or jumped."""
        return (  # comparisons alone, all False for NaN: this runs at every iteration
            0.0 < self.end_s - self.start_s - self.waited_s - self.met_s <= LONGEST_S
            and self.waited_s >= 0.0
            and self.met_s >= 0.0
            and 0.0 <= self.stall_s <= LONGEST_S
            and (self.overlap_s is None or 0.0 <= self.overlap_s <= LONGEST_S)
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of a checkpoint that became durable; ``device_copy_s`` only of a device snapshot."""

    copy_s: float
    persist_s: float
    durable_s: float
    state_bytes: int
    device_copy_s: float | None = None

    def is_sane(self) -> bool:
        """False if any of it is not a number >= 0, or no time that anything takes."""
        times_s = (self.copy_s, self.persist_s, self.durable_s, self.device_copy_s or 0.0)
        return is_amount(self.state_bytes) and all(0.0 <= time_s <= LONGEST_S for time_s in times_s)
