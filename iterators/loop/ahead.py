"""Notices a loop that fetches batches before the update that uses the one before (a prefetcher).

Which batches an update used cannot be seen, but a look-ahead of ``k`` shows in how many are fetched
per update: ``k`` more before the first one than before each later one. Training thread only.
"""

from __future__ import annotations

import logging

from iterators.loop.boundary_rule import CountsUpdates

logger = logging.getLogger(__name__)

#: So many groups of the same size after the first one make a pattern: a loop that accumulates up
#: to a number of tokens has groups of any size.
_ENOUGH = 4
#: More batches before the first update are a warm-up.
_MOST_AHEAD = 8


class AheadWatch:
    """Counts the batches per update, until it is clear whether the loop over ``name`` looks ahead.

    A loop that leaves its first batch without an update looks the same, so it is only warned about.
    """

    def __init__(self, name: str, manager: CountsUpdates) -> None:
        self._name, self._manager = name, manager
        self._first: int | None = None
        self._later: int | None = None
        self._num_later = 0
        self.starts_pass()

    def starts_pass(self) -> None:
        """A pass over an epoch begins."""
        self._attempts, self._size, self._is_first = self._manager.update_attempts, 0, True

    def delivers(self) -> bool:
        """A batch is about to be handed out. Whether there is more to see."""
        goes_on = True
        if self._manager.update_attempts != self._attempts:
            goes_on = not self._size or self._ends_group()
            self._attempts, self._size = self._manager.update_attempts, 0
        self._size += 1
        return goes_on

    def _ends_group(self) -> bool:
        size = self._size
        if self._is_first:
            self._is_first, known, self._first = False, self._first, size
        else:
            known, self._later = self._later, size
            self._num_later += 1
        if known not in (None, size):
            return False
        if self._first is None or self._later is None or self._num_later < _ENOUGH:
            return True
        if 0 < (ahead := self._first - self._later) <= _MOST_AHEAD:
            logger.warning(
                "iterator %r: the loop fetched %d batches before its first weight update, and %d "
                "before each later one. If it runs ahead (a prefetcher, or a batch drawn before "
                "the update), batches are lost at each restart: write CFIterator(..., "
                "lookahead=%d), or fetch the next batch after the update. If the first batches "
                "were meant for no update, write lookahead=0",
                self._name,
                self._first,
                self._later,
                ahead,
            )
        return False
