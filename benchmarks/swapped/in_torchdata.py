"""pytest plugin: a ``StatefulDataLoader`` is iterated over, and its place kept, by CFIterator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torchdata.stateful_dataloader as theirs

from iterators import CFIterator

_Theirs = theirs.StatefulDataLoader
_NOTHING = object()


class Swapped:
    """``state_dict()`` is of the boundary before the next batch, which it fetches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._loader = _Theirs(*arguments, **options)
        self._batches = self._new()
        self._running: Iterator[Any] | None = None
        self._held = _NOTHING

    def _new(self) -> CFIterator:
        with patch.object(theirs, "StatefulDataLoader", _Theirs):  # by which ours knows it
            return CFIterator(self._loader, seed=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._running, self._held = iter(self._batches), _NOTHING
        return self._served(self._running)

    def _served(self, running: Iterator[Any]) -> Iterator[Any]:
        while True:
            batch = next(running, _NOTHING) if self._held is _NOTHING else self._held
            self._held = _NOTHING
            if batch is _NOTHING:
                iter(self._batches)  # the epoch has ended: its last boundary
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was served."""
        if self._running is not None and self._held is _NOTHING:
            self._held = next(self._running, _NOTHING)
            if self._held is _NOTHING:
                iter(self._batches)
        return self._batches.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue there. A CFIterator takes no position once a batch was used: a new one does."""
        self._batches, self._running = self._new(), None
        self._batches.load_state_dict(state)


theirs.StatefulDataLoader = Swapped
