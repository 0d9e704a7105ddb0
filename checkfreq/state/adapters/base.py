"""What the adapters share: the saved half of one object, findings, and changes to make.

An adapter knows one kind of object in both directions. ``capture`` reads it without side
effects; ``prepare`` compares it with a saved state and returns the changes that would restore
it, having changed nothing. Changes that run user code come apart from those that only copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from checkfreq.state.collector import StateCollector
from checkfreq.state.saved import SavedObject
from checkfreq.store.boxes import Box
from checkfreq.types import Json


@dataclass(slots=True)
class Findings:
    """What comparing saved with live state turned up."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    #: Hyper-parameters set by the script that the checkpoint overrides: "name: old -> new".
    overridden: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def mismatches(self) -> bool:
        """Whether the checkpoint does not fit."""
        return bool(self.missing or self.unexpected or self.different)

    def compare_names(self, prefix: str, saved: Iterable[str], live: Iterable[str]) -> None:
        """List the names that only one side has."""
        there, here = dict.fromkeys(saved), dict.fromkeys(live)
        self.missing += [f"{prefix}.{name}" for name in here if name not in there]
        self.unexpected += [f"{prefix}.{name}" for name in there if name not in here]


@dataclass(frozen=True, slots=True)
class Fallible:
    """A change that runs user code: ``load`` may raise, ``backup()`` returns its undo."""

    name: str
    backup: Callable[[], Callable[[], None]]
    load: Callable[[], None]


@dataclass(slots=True)
class Changes:
    """What would restore one object. ``copies`` only copy and set, and do not raise."""

    fallible: list[Fallible] = field(default_factory=list)
    copies: list[Callable[[], None]] = field(default_factory=list)


#: ``holdings(key, shape)``: the boxes that live objects have of a saved tensor of that shape.
Holdings: TypeAlias = Callable[[str, tuple[int, ...]], Iterable[Box]]


class Adapter(Protocol):
    """One tracked object, by its kind."""

    @property
    def kind(self) -> str:
        """Name of the kind in the manifest."""
        ...

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """Add every tensor to ``collector`` and return the rest as JSON; change nothing."""
        ...

    def holdings(self) -> Holdings:
        """What the live object needs of each saved tensor; changes nothing."""
        ...

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """Compare with ``saved``, add to ``findings``, return the changes for what fits."""
        ...


def all_of_it(key: str, shape: tuple[int, ...]) -> Iterable[Box]:
    """Holdings of an object that has no DTensors."""
    return (Box.whole(shape),)


def type_name(value: object) -> str:
    """Qualified name of a value's class, as recorded in manifests and shown in errors."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
