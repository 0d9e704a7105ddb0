"""Where an iterator that marks no steps stood at the last weight update. Training thread only.

Another iterator passes the boundaries, when its own next batch is asked for. In ``zip(second,
main)`` the next batch of ``second`` is fetched before that: no update has used it yet, so a
position saved at the boundary must not cover it. But a batch that is asked for only after the
update (by validation, say) belongs to the iteration that ends at the boundary.
"""

from __future__ import annotations

import contextlib
from typing import Protocol
from weakref import WeakKeyDictionary

from iterators.loop.cursor import Cursor
from iterators.order.position import Position
from iterators.protocol import Manager


class Marking(Protocol):
    """The passes of the iterator that marks steps."""

    @property
    def owes_boundary(self) -> bool:
        """Whether an update was attempted since the first batch that no boundary covers."""
        ...

    @property
    def is_turning(self) -> bool:
        """Whether a turn of ``epochs()`` ends: what was fetched for it is used or dropped."""
        ...


_marking: WeakKeyDictionary[Manager, Marking] = WeakKeyDictionary()


def marks_for(manager: Manager, marking: Marking) -> None:
    """Let the other iterators of ``manager`` know the one that passes the boundaries."""
    with contextlib.suppress(TypeError):  # a manager without weak references
        _marking[manager] = marking


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
        if self._attempts is None:
            marking = _marking.get(self._manager)
            self._comes_first |= marking is None or not marking.owes_boundary
        self._attempts = attempts
        if self._comes_first:
            self._before = self._cursor.position_used()

    def position(self) -> Position:
        """The position within the pass that is open."""
        marking = _marking.get(self._manager)
        is_unused = self._attempts == self._manager.update_attempts
        is_dropped = marking is not None and marking.is_turning
        if self._before is not None and is_unused and not is_dropped:
            return self._before
        return self._cursor.position_used()
