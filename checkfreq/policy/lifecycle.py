"""The states of one checkpoint attempt and the legal moves between them.

::

    COPYING --copy done, handed to the worker--> PERSISTING --> COMMITTED
       |                                            |
       `--copy failed--> VOID                       `--> FAILED

An attempt owns an arena slot from COPYING until it reaches an end state, so that no snapshot is
overwritten before it is durable or abandoned.
"""

from __future__ import annotations

from enum import Enum


class AttemptState(Enum):
    """How far an attempt has come."""

    COPYING = "copying"
    PERSISTING = "persisting"
    COMMITTED = "committed"
    FAILED = "failed"
    VOID = "void"

    @property
    def ended(self) -> bool:
        """True when the attempt no longer owns its slot."""
        return not _MOVES[self]


_MOVES: dict[AttemptState, frozenset[AttemptState]] = {
    AttemptState.COPYING: frozenset({AttemptState.PERSISTING, AttemptState.VOID}),
    AttemptState.PERSISTING: frozenset({AttemptState.COMMITTED, AttemptState.FAILED}),
    AttemptState.COMMITTED: frozenset(),
    AttemptState.FAILED: frozenset(),
    AttemptState.VOID: frozenset(),
}


def moved(current: AttemptState, target: AttemptState) -> AttemptState:
    """Return ``target`` if the move is legal; an illegal one is a bug of ours."""
    assert target in _MOVES[current], f"illegal move {current.name} -> {target.name}"
    return target
