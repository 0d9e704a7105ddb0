"""The rule that says when an iteration boundary is due. Training thread only.

A boundary is due once a weight update was attempted after the batches that were handed out since
the last boundary, or after every ``accumulate`` batches if that is given. Without a manager nobody
counts updates, so every batch is followed by a boundary. The last ``lookahead`` batches do not
count: the loop has fetched them, and uses them later.
"""

from __future__ import annotations

from typing import Protocol


class CountsUpdates(Protocol):
    """The part of a manager that this rule reads."""

    @property
    def update_attempts(self) -> int:
        """How many weight updates were attempted since the run began."""
        ...


class BoundaryRule:
    """Whether the batches since the last boundary, ``pending`` of them, make the next one due."""

    def __init__(
        self, manager: CountsUpdates | None, *, accumulate: int | None, lookahead: int = 0
    ) -> None:
        self._manager, self._accumulate, self.lookahead = manager, accumulate, lookahead
        self._attempts_before_group = 0

    @property
    def counts_batches(self) -> bool:
        """Whether boundaries come after a fixed number of batches (``accumulate``)."""
        return self._accumulate is not None

    @property
    def attempts(self) -> int:
        """Weight updates attempted so far; 0 without a manager."""
        return 0 if self._manager is None else self._manager.update_attempts

    def start_group(self) -> None:
        """A boundary was passed, or the first batch since then is about to be handed out.

        Updates attempted before belong to earlier batches (a warm-up step of the user's, for
        example) and must not make a boundary due.
        """
        self._attempts_before_group = self.attempts

    def is_due(self, pending: int, *, epoch_over: bool = False) -> bool:
        """Whether a boundary is due. A shorter group at the end of an epoch counts as a whole.

        Once the epoch is over nothing is ahead: the loop uses all that it has fetched.
        """
        used = pending if epoch_over else pending - self.lookahead
        if used <= 0:
            return False
        if self._accumulate is not None:
            return epoch_over or used >= self._accumulate
        return self._manager is None or self.updated_in_group()

    def is_early(self, pending: int) -> bool:
        """Whether an update came before ``lookahead`` batches and one more were fetched."""
        return 0 < pending <= self.lookahead and self.updated_in_group()

    def no_update_since(self, attempts: int) -> bool:
        """Whether a manager counts updates and has counted none since ``attempts`` was read."""
        return self._manager is not None and self.attempts == attempts

    def num_unused(self, pending: int) -> int:
        """How many of the pending batches no update has used yet."""
        if self._manager is None or self.updated_in_group():
            return 0
        return max(0, pending - self.lookahead)

    def updated_in_group(self) -> bool:
        """Whether an update was attempted since ``start_group``."""
        return self.attempts != self._attempts_before_group
