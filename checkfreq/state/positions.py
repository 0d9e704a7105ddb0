"""The iterators of a run, whose positions every checkpoint holds.

Each rank saves the positions of its own iterators. A restore gets the positions that all ranks
saved, and lets an iterator that has ``merged_state`` merge them. Positions whose iterator is not
registered in this run are carried over into its checkpoints. Only the leader does that, for all
ranks and unchanged, so that none is lost or counted twice whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from checkfreq.errors import ConfigError
from checkfreq.types import Role

#: The positions that each rank saved under one name, in the order of ranks; None: it saved none.
RankStates: TypeAlias = Sequence[dict[str, Any] | None]

#: The key of a position that holds those of several ranks, carried over.
CARRIED = "$carried"


class PositionSource(Protocol):
    """An iterator as a manager sees it."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...
    def finish(self) -> None: ...


class Positions:
    """Registered iterators by name, and restored positions whose iterator is not yet registered."""

    def __init__(self, role: Role = Role()) -> None:
        self._role = role
        self._sources: dict[str, PositionSource] = {}
        self._waiting: dict[str, list[dict[str, Any] | None]] = {}

    def register(self, name: str, source: PositionSource) -> None:
        """Add an iterator and give it its restored position, if there is one.

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
            source.load_state_dict(self._state_for(source, self._waiting[name]))
            del self._waiting[name]
        self._sources[name] = source

    def read(self) -> dict[str, dict[str, Any]]:
        """All current positions of this rank, and those that it carries over."""
        live = {name: source.state_dict() for name, source in self._sources.items()}
        return {**self._carried(), **live}

    def _carried(self) -> dict[str, dict[str, Any]]:
        """A single rank's position unchanged; those of several ranks in one.

        A position that a rank saved itself takes precedence when it is restored.
        """
        if not self._role.leads:
            return {}
        carried: dict[str, dict[str, Any]] = {}
        for name, states in self._waiting.items():
            alone = states[0] if len(states) == 1 and self._role.is_alone else None
            carried[name] = alone or {CARRIED: states}
        return carried

    def layouts(self) -> dict[str, Any]:
        """Batch size, workers and the like of each iterator, if its state has them."""
        return {name: state.get("layout") for name, state in self.read().items()}

    def restore(self, positions: Mapping[str, RankStates | dict[str, Any]]) -> Callable[[], None]:
        """Give each iterator its position, now or when it registers; returns what undoes it.

        ``positions`` holds what each rank saved, in the order of ranks (of one rank, its position
        itself). An iterator with ``merged_state`` gets what that returns, any other the position
        that this rank saved or, on a new rank, the first rank's. If an iterator refuses its
        position, the positions set before it are put back and its error is raised.
        """
        earlier: dict[str, dict[str, Any]] = {}
        waiting = dict(self._waiting)

        def take_back() -> None:
            self._waiting = waiting
            for name, state in earlier.items():
                self._sources[name].load_state_dict(state)

        try:
            for name, states in positions.items():
                self._move(name, _unpacked(states), earlier)
        except Exception:
            take_back()
            raise
        return take_back

    def _move(
        self,
        name: str,
        states: list[dict[str, Any] | None],
        earlier: dict[str, dict[str, Any]],
    ) -> None:
        if name not in self._sources:
            self._waiting[name] = states
            return
        source = self._sources[name]
        before = source.state_dict()
        source.load_state_dict(self._state_for(source, states))
        earlier[name] = before  # not sooner: only a position that was loaded has to be undone

    def _state_for(
        self, source: PositionSource, states: list[dict[str, Any] | None]
    ) -> dict[str, Any]:
        """The position that this rank's ``source`` continues from."""
        saved = [state for state in states if state is not None]
        merge = getattr(source, "merged_state", None)
        merged: dict[str, Any] | None = merge(saved) if merge is not None else None
        if merged is not None:
            return merged
        own = states[self._role.rank] if self._role.rank < len(states) else None
        return saved[0] if own is None else own

    def using_batch(self) -> str | None:
        """The name of an iterator whose batch is in use, or None."""
        using = (n for n, s in self._sources.items() if getattr(s, "is_using_batch", False))
        return next(using, None)

    def finish(self) -> None:
        """Have each iterator pass the boundary that is still due."""
        for source in self._sources.values():
            source.finish()


def by_name(found: Mapping[int, Mapping[str, dict[str, Any]]]) -> dict[str, RankStates]:
    """The argument of ``restore``, from what each rank saved by name."""
    names = {name: None for positions in found.values() for name in positions}
    ranks = range(max(found, default=-1) + 1)
    return {name: [found.get(rank, {}).get(name) for rank in ranks] for name in names}


def _unpacked(states: RankStates | dict[str, Any]) -> list[dict[str, Any] | None]:
    """Positions by rank; one carried over counts only if no rank saved a position of its own."""
    by_rank = [states] if isinstance(states, dict) else list(states)
    carried = [state[CARRIED] for state in by_rank if state is not None and CARRIED in state]
    own = [None if state is not None and CARRIED in state else state for state in by_rank]
    return list(carried[0]) if carried and not any(own) else own
