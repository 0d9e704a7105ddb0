"""The interface of an adapter, which knows how to save and restore one kind of object.

``capture`` reads the object without side effects. ``prepare`` compares it with a saved state and
returns the changes that would restore it, without making any. They come in three parts, in this
order: user code, which may raise and is undone; live tensors, which are filled from the files; and
what only sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from checkfreq.state.collector import StateCollector
from checkfreq.state.saved import SavedObject
from checkfreq.state.saved_tensor import SavedTensor
from checkfreq.store.boxes import Box
from checkfreq.types import Json


@dataclass(slots=True)
class Findings:
    """The differences between saved and live state, as names or sentences."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    #: What the script gives in another way than at the run's first start, and the checkpoint
    #: overrides: by a sentence, the name that ``restore(keep=...)`` takes.
    overridden: dict[str, str] = field(default_factory=dict)
    #: Flags of modules that the checkpoint overrides.
    flags: list[str] = field(default_factory=list)
    #: Whether training goes on from the checkpoint, with the flags of its modules.
    resumes: bool = True
    #: Whether user code may get extra state that this user cannot be shown to have saved.
    trusts: bool = False
    #: Whether all must fit: otherwise what does not is left out.
    strict: bool = True
    #: What is left as it is, although it fits: for a WARNING.
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
    """A change that runs user code: ``load()`` may raise, and ``backup()`` returns its undo."""

    name: str
    backup: Callable[[], Callable[[], None]]
    load: Callable[[], None]


class Filled(NamedTuple):
    """A tensor that is filled in place, live or about to be; ``name`` is for messages."""

    name: str
    tensor: Tensor
    saved: SavedTensor


@dataclass(slots=True)
class Changes:
    """The changes that would restore one object.

    ``fallible`` runs user code, after everything that was asked of ``SavedObject.own`` was read.
    ``filled`` are read into their places after that. ``sets`` come last, and cannot raise.
    ``new_bytes``: memory that was allocated for ``filled`` and is not live yet.
    """

    fallible: list[Fallible] = field(default_factory=list)
    filled: list[Filled] = field(default_factory=list)
    sets: list[Callable[[], None]] = field(default_factory=list)
    new_bytes: int = 0


#: ``holdings(key, shape)``: the boxes of a saved tensor of that shape that the live object holds.
Holdings: TypeAlias = Callable[[str, tuple[int, ...]], Iterable[Box]]


class Adapter(Protocol):
    """Saves and restores one tracked object."""

    @property
    def kind(self) -> str:
        """Name of the kind in the manifest."""
        ...

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """Add every tensor to ``collector`` and return the rest as JSON; change nothing."""
        ...

    def holdings(self) -> Holdings:
        """Which part of each saved tensor the live object needs; changes nothing."""
        ...

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """Compare with ``saved``, add to ``findings``, and return the changes for what fits."""
        ...


def all_of_it(key: str, shape: tuple[int, ...]) -> Iterable[Box]:
    """The holdings of an object without DTensors: every tensor whole."""
    return (Box.whole(shape),)


def type_name(value: object) -> str:
    """Qualified name of a value's class, as recorded in manifests and shown in errors."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
