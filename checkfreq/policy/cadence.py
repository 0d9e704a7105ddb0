"""When a checkpoint is due, for an interval the user gave (CFMode.MANUAL). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from checkfreq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ManualCadence:
    """Due at every multiple of ``interval_steps``; 0 means at epoch boundaries only."""

    interval_steps: int

    def __post_init__(self) -> None:
        if self.interval_steps < 0:
            raise ConfigError(
                f"chk_freq: expected a number of iterations >= 0, got {self.interval_steps}"
            )

    def is_due(self, *, step: int, last_step: int, epoch_boundary: bool) -> bool:
        """True if a checkpoint should start at boundary ``step``.

        ``last_step`` is the step of the last checkpoint that was started or restored; 0 if there
        is none. A multiple that was missed because no slot was free stays due until a checkpoint
        is taken.
        """
        if self.interval_steps == 0:
            return epoch_boundary and step > last_step
        return step // self.interval_steps > last_step // self.interval_steps
