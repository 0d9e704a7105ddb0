"""The iterators of a run: whose positions go into every checkpoint, and come back from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
            source.load_state_dict(self._waiting[name])
            del self._waiting[name]
        self._sources[name] = source

    def read(self) -> dict[str, dict[str, Any]]:
        """Every position now; one whose iterator never came is carried on."""
        live = {name: source.state_dict() for name, source in self._sources.items()}
        return {**self._waiting, **live}

    def layouts(self) -> dict[str, Any]:
        """Batch sizes, workers and the like, of every iterator that says."""
        return {name: state.get("layout") for name, state in self.read().items()}

    def restore(self, positions: Mapping[str, dict[str, Any]]) -> Callable[[], None]:
        """Give each iterator its position, now or when it registers; returns what undoes it.

        An iterator that refuses its position raises, and those before it are put back.
        """
        earlier: dict[str, dict[str, Any]] = {}
        waiting = dict(self._waiting)

        def take_back() -> None:
            self._waiting = waiting
            for name, state in earlier.items():
                self._sources[name].load_state_dict(state)

        try:
            for name, state in positions.items():
                self._move(name, state, earlier)
        except Exception:
            take_back()
            raise
        return take_back

    def _move(self, name: str, state: dict[str, Any], earlier: dict[str, dict[str, Any]]) -> None:
        if name not in self._sources:
            self._waiting[name] = state
            return
        before = self._sources[name].state_dict()
        self._sources[name].load_state_dict(state)
        earlier[name] = before

    def using_batch(self) -> str | None:
        """The name of an iterator whose batch is being used, if there is one."""
        using = (n for n, s in self._sources.items() if getattr(s, "is_using_batch", False))
        return next(using, None)

    def finish(self) -> None:
        """Have each iterator pass the boundary it still owes."""
        for source in self._sources.values():
            source.finish()
