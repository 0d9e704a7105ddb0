"""Checks of the values in a record that was read: anything may be in it. Pure.

A value that cannot be is a `ManifestError`, which whoever knows the path turns into a
CorruptCheckpointError.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from checkfreq.types import Json

LARGEST = 2**63 - 1
#: Levels of nested containers. ``state.codec`` writes at most 300.
_MAX_DEPTH = 400

#: For error messages, bounded in length and depth: a damaged manifest may hold anything.
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120

T = TypeVar("T")


class ManifestError(ValueError):
    """A manifest with an impossible value, named by ``check``: ``expected`` against ``got``."""

    def __init__(self, check: str, expected: object, got: object) -> None:
        self.check = check
        self.expected = expected
        self.got = _REPR.repr(got)
        super().__init__(f"manifest: {check}: expected {expected}, got {self.got}")


def load_json(data: bytes) -> Json:
    """The value of a JSON text; ManifestError for what is none, or has more than one reading."""
    try:
        return json.loads(
            data, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite
        )
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:
        raise ManifestError("JSON", "a JSON text", str(error)) from None


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ManifestError("keys of an object", "no repetition", list(found))
    return found


def require_depth(value: Json) -> None:
    """ManifestError for deeper nesting: decoding it, or showing it, would overflow the stack."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        nodes = [node.values() if isinstance(node, dict) else node for node in level]
        level = [inner for node in nodes for inner in node if isinstance(inner, dict | list)]
        if not level:
            return
    raise ManifestError("nesting", f"at most {_MAX_DEPTH} deep", "more")


def _no_constant(name: str) -> Json:
    raise ManifestError("number", "a finite number", name)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # 1e999
        raise ManifestError("number", "a finite number", text)
    return value


def tuple_of(value: Json, convert: Callable[[Json], T]) -> tuple[T, ...]:
    """Each item of a list, converted."""
    require(isinstance(value, list), "list", "a list", value)
    return tuple(map(convert, value))


def as_object(value: Json, what: str) -> dict[str, Json]:
    """The value, which is a JSON object."""
    require(isinstance(value, dict), what, "an object", value)
    found: dict[str, Json] = value
    return found


def require(holds: bool, check: str, expected: object, got: object) -> None:
    """ManifestError unless ``holds``."""
    if not holds:
        raise ManifestError(check, expected, got)


def require_count(value: Any, check: str) -> None:
    """ManifestError for anything but a number of things, or of bytes."""
    require(is_count(value), check, "a whole number from 0 to 2**63-1", value)


def is_count(value: Any) -> bool:
    """Whether it is a whole number that is not negative, and fits in 64 bits."""
    return type(value) is int and 0 <= value <= LARGEST


def require_match(pattern: re.Pattern[str], value: Any, check: str, expected: str) -> None:
    """ManifestError unless it is a string of that pattern."""
    good = isinstance(value, str) and pattern.fullmatch(value) is not None
    require(good, check, expected, value)


def require_unique(names: Iterable[str], check: str) -> None:
    """ManifestError if a name is there twice."""
    seen: set[str] = set()
    for name in names:
        require(name not in seen, check, "no repetition", name)
        seen.add(name)


def is_time(value: Any) -> bool:
    """Whether it can be a Unix time."""
    return type(value) in (int, float) and 0 <= value <= LARGEST
