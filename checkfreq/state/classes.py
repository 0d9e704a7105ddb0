"""Objects inside of state: members of enums, named tuples, and objects that are their attributes.

No class is looked up by a name in a file. A file's name is compared with those of the classes that
are at hand: what the script (``__main__``), the modules of the tracked object's class and of its
bases, and the loaded modules of its package define; of enums and tuples, also what they import. Of
these classes nothing runs: a tuple gets its items and an object its attributes, none of which can
hide a method.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Mapping
from types import MemberDescriptorType
from typing import Any

from checkfreq.errors import StateError, printable

_REDUCERS = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__getattribute__")
_SPECIAL = ("__setstate__", "__copy__", "__deepcopy__", "__del__")
#: Packages of which only the modules of a class and of its bases are searched.
_NOT_SEARCHED = ("torch", "builtins")


class Classes:
    """The classes at hand for the state of one object, of class ``owner``, in one pass over it."""

    def __init__(self, owner: type) -> None:
        self._owner = owner
        self._seen: dict[int, tuple[str, Any]] = {}  # holds the objects, so that ids stay theirs

    def find(self, name: str) -> type:
        """The class that is called so. Raises StateError if none is."""
        found = _at_hand(self._owner).get(name)
        if found is None:
            _at_hand.cache_clear()
            found = _at_hand(self._owner).get(name)
        if found is None:
            raise StateError(
                f"the checkpoint holds an object of {printable(name):.200}, and no class of that "
                "name is at hand; it was defined in the script, or in the package of the tracked "
                "object's class: import it before restore()"
            )
        return found

    def holds(self, kind: type) -> bool:
        """Whether ``find`` would return it."""
        name = name_of(kind)
        if _at_hand(self._owner).get(name) is not kind:
            _at_hand.cache_clear()
        return _at_hand(self._owner).get(name) is kind

    def first_place(self, value: Any, path: str) -> str:
        """Where an object was seen first: ``path`` unless this was asked before."""
        return self._seen.setdefault(id(value), (path, value))[0]


@functools.lru_cache(maxsize=32)
def _at_hand(owner: type) -> dict[str, type]:
    package = owner.__module__.partition(".")[0]
    names = {"__main__", *(base.__module__ for base in owner.__mro__)} - {"builtins"}
    if package not in _NOT_SEARCHED:
        names |= {n for n in [*sys.modules] if n == package or n.startswith(f"{package}.")}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    # Not isinstance(), which asks a lazy value what it claims to be.
    found = (v for m in modules for v in [*vars(m).values()] if issubclass(type(v), type))
    return {
        name_of(kind): kind
        for kind in found
        if kind.__module__ in names or issubclass(kind, enum.Enum | tuple)
    }


def name_of(kind: type) -> str:
    """The qualified name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def is_member(value: Any) -> bool:
    """Whether it is a named member of an enum."""
    kind = type(value)
    return issubclass(kind, enum.Enum) and kind.__members__.get(value.name) is value


def is_named_tuple(kind: type) -> bool:
    """Whether objects of a class are tuples with names for all items, and no more than that."""
    fields = getattr(kind, "_fields", None)
    return bool(
        issubclass(kind, tuple)
        and isinstance(fields, tuple)
        and all(type(name) is str for name in fields)
        and kind.__dictoffset__ == 0
    )


def is_plain(kind: type) -> bool:
    """Whether an object of a class is its attributes alone, as those of most dataclasses are.

    A class is not that has a way of its own to be copied, made or deleted.
    """
    return bool(
        kind.__dictoffset__
        and type not in kind.__mro__
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in _REDUCERS)
        and not any(hasattr(kind, name) for name in _SPECIAL)
        and not any(_has_slots(base) for base in kind.__mro__)
    )


def can_be_made(value: Any) -> bool:
    """Whether ``made`` gives an object that is equal to this one.

    One without attributes is not: it may be a constant, of which there must be one only.
    """
    kind = type(value)
    if is_named_tuple(kind):
        return True
    return is_plain(kind) and bool(fields_of(value)) and not _hidden(kind, fields_of(value))


def _has_slots(kind: type) -> bool:
    return any(type(value) is MemberDescriptorType for value in vars(kind).values())


def is_frozen(kind: type) -> bool:
    """Whether it is a frozen dataclass, of which several owners may hold one object."""
    return bool(getattr(getattr(kind, "__dataclass_params__", None), "frozen", False))


def fields_of(value: Any) -> dict[str, Any]:
    """What a named tuple or a plain object consists of; of the latter its own dict."""
    if isinstance(value, tuple):
        return dict(zip(type(value)._fields, value, strict=True))  # type: ignore[attr-defined]
    found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    return found


def member(kind: type, name: str) -> Any:
    """The member of an enum. Raises ValueError if it has none of this name."""
    if not issubclass(kind, enum.Enum) or name not in kind.__members__:
        raise ValueError(f"{name_of(kind)} has no member {name!r:.80}")
    return kind.__members__[name]


def made(kind: type, fields: Mapping[str, Any]) -> Any:
    """An object of a class with these fields. Raises ValueError for fields that it cannot have."""
    if is_named_tuple(kind):
        if tuple(fields) != kind._fields:  # type: ignore[attr-defined]
            raise ValueError(f"{name_of(kind)} has not the fields {[*fields]!r:.200}")
        return tuple.__new__(kind, fields.values())
    if not is_plain(kind):
        raise ValueError(f"objects of {name_of(kind)} are not their attributes alone")
    if hidden := _hidden(kind, fields):
        raise ValueError(f"{name_of(kind)} has no attributes {hidden!r:.80}")
    new: Any = object.__new__(kind)
    fields_of(new).update(fields)
    return new


def _hidden(kind: type, fields: Mapping[str, Any]) -> list[Any]:
    """Names among those of attributes that would hide a method, or are no names of attributes."""
    return [
        name
        for name in fields
        if type(name) is not str or name[:2] == "__" or callable(getattr(kind, name, None))
    ]
