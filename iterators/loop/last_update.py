"""Where an iterator that marks no steps stood at the last weight update. Training thread only.

Another iterator passes the boundaries, when its own next batch is asked for. In ``zip(second,
main)`` the next batch of ``second`` is fetched before that: no update has used it yet, so a
position saved at the boundary must not cover it. But a batch that is asked for only after the
update (by validation, say) belongs to the iteration that ends at the boundary.
"""

from __future__ import annotations

from iterators.loop.cursor import Cursor
from iterators.order.position import Position
from iterators.protocol import Manager


class LastUpdate:
    """Which batches that ``cursor`` has delivered the last update came after."""

    def __init__(self, manager: Manager, cursor: Cursor) -> None:
        self._manager, self._cursor = manager, cursor
        #: Whether the loop fetches the batches before the update that uses them.
        self._comes_first = False
        self.forget()

    def forget(self) -> None:
        """A pass was left, so its batches never come again; or a position was loaded."""
        self._attempts: int | None = None
        self._before: Position | None = None

    def delivers(self) -> None:
        """A batch is about to be handed out."""
        attempts = self._manager.update_attempts
        if attempts == self._attempts:
            return
        if self._attempts is None and getattr(self._manager, "at_boundary", True):
            self._comes_first = True
        self._attempts = attempts
        if self._comes_first:
            self._before = self._cursor.position_used()

    def position(self) -> Position:
        """The position within the pass that is open."""
        is_unused = self._attempts == self._manager.update_attempts
        if is_unused and self._comes_first and self._before is not None:
            return self._before
        return self._cursor.position_used()
