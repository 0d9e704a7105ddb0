"""The iterators of a run: whose positions go into every checkpoint, and come back from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from checkfreq.errors import ConfigError


class PositionSource(Protocol):
    """An iterator as a manager sees it."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...
    def finish(self) -> None: ...


class Positions:
    """Registered iterators by name, and restored positions that wait for theirs."""

    def __init__(self) -> None:
        self._sources: dict[str, PositionSource] = {}
        self._waiting: dict[str, dict[str, Any]] = {}

    def register(self, name: str, source: PositionSource) -> None:
        """Add an iterator and give it the position that waits for it.

        Raises ConfigError for a name in use, or a second iterator that marks steps.
        """
        if name in self._sources:
            raise ConfigError(f"an iterator named {name!r} is registered; pass another name=")
        marking = [n for n, s in self._sources.items() if getattr(s, "marks_steps", False)]
        if marking and getattr(source, "marks_steps", False):
            raise ConfigError(
                f"iterators {marking[0]!r} and {name!r} both mark steps, so each step would count "
                "twice; pass marks_steps=False to one of them"
            )
        if name in self._waiting:
            source.load_state_dict(self._waiting.pop(name))
        self._sources[name] = source

    def read(self) -> dict[str, dict[str, Any]]:
        """Every position now; one whose iterator never came is carried on."""
        live = {name: source.state_dict() for name, source in self._sources.items()}
        return {**self._waiting, **live}

    def restore(self, positions: Mapping[str, dict[str, Any]]) -> None:
        """Give each iterator its position, now or when it registers."""
        for name, state in positions.items():
            if name in self._sources:
                self._sources[name].load_state_dict(state)
            else:
                self._waiting[name] = state

    def finish(self) -> None:
        """Have each iterator pass the boundary it still owes."""
        for source in self._sources.values():
            source.finish()
