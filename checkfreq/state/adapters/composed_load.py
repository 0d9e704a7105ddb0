"""Composed tensors (``state/composed.py``) into live ones that are the same kind of tensor.

A wrapper subclass is filled part by part, like any tensor. The parts of all others are read into
memory of their own first: indices and offsets must make sense before a live tensor has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor

from checkfreq.state.adapters.base import Fallible, Filled
from checkfreq.state.composed import SUBCLASS, VIEW, is_composed, part_name, put, take_apart
from checkfreq.state.saved import SavedObject


class ComposedLoad:
    """The composed tensors of one object. ``place`` them all, then hand over the changes."""

    def __init__(self, saved: SavedObject) -> None:
        self._saved = saved
        self._live: dict[int, Tensor] = {}
        self._asked: list[tuple[str, str]] = []
        self._puts: list[tuple[Tensor, str, str]] = []
        self._alike: set[str] = set()
        self.filled: list[Filled] = []

    def compare(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Find out which live tensors share memory as the saved ones did.

        ``pairs``: of every tensor of the object, the key and what is live at its place.
        """
        begins: dict[str, set[int | None]] = {}
        for name, live in pairs:
            if (record := self._saved.composed.get(name, {})).get("kind") == VIEW:
                begin = None
                if isinstance(live, Tensor) and not self._saved.misfit(name, live):
                    begin = live.data_ptr() - record["offset"] * live.element_size()
                begins.setdefault(self._memory(name), set()).add(begin)
        self._alike = {n for n, found in begins.items() if len(found) == 1 and None not in found}

    def fits(self, name: str, live: Tensor) -> bool:
        """Whether ``live`` can become the saved tensor ``name``."""
        is_view = self._saved.composed[name]["kind"] == VIEW
        shares = not is_view or self._memory(name) in self._alike
        return shares and not self._saved.misfit(name, live)

    def _memory(self, name: str) -> str:
        return self._saved.record(part_name(name, "memory")).name

    def place(self, name: str, live: Tensor) -> None:
        """Have ``live``, which fits, become the saved tensor ``name``."""
        if self._live.setdefault(id(live), live) is not live:
            return
        path = f"{self._saved.name}.{name}"
        if self._saved.composed[name]["kind"] != SUBCLASS:
            self._puts.append((live, *self.ask(name, str(live.device))))
            return
        for part, tensor in take_apart(live, path)[1].items():
            key = part_name(name, part)
            if is_composed(tensor):
                self.place(key, tensor)
            else:
                record = self._saved.record(key)
                self.filled.append(Filled(f"{self._saved.name}.{key}", tensor, record))

    def ask(self, name: str, device: str) -> tuple[str, str]:
        """Have a tensor built before anything live changes; the arguments for ``owned`` then."""
        self._saved.own(name, device)
        self._asked.append((name, device))
        return name, device

    @property
    def fallible(self) -> list[Fallible]:
        """Builds what was asked for, which fails if the bytes make no tensor; changes nothing."""
        if not self._asked:
            return []
        return [Fallible(self._saved.name, _nothing_to_undo, self._build)]

    @property
    def sets(self) -> list[Callable[[], None]]:
        """Puts what was built into the live tensors."""
        return [partial(self._put, *one) for one in self._puts]

    def _build(self) -> None:
        for name, device in self._asked:
            self._saved.owned(name, device)

    def _put(self, live: Tensor, name: str, device: str) -> None:
        put(live, self._saved.owned(name, device))


def _nothing_to_undo() -> Callable[[], None]:
    return _nothing


def _nothing() -> None:
    return None
