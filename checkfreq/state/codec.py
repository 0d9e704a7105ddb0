"""Python values to JSON and back, exactly, without pickle and without torch.

None, bool, str, finite floats, lists and dicts with string keys map to JSON directly. Any other
type becomes an object whose first key, the tag, starts with ``$``: ``{"$tuple": [1, 2]}``,
``{"$float": "inf"}``, ``{"$dict": [[1, "a"]]}``. Types are matched exactly: a subclass would be
decoded as its base, so it is refused, with its path, unless it is one of ``Classes``. Long lists of
numbers of one type are packed.

Tensors are left to a ``leaf`` function of the caller: when encoding, it may turn a value into a
tagged object; when decoding, it gets every tag that is unknown here.
"""

from __future__ import annotations

import base64
import contextlib
import math
import re
import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path, PosixPath, PurePath, PurePosixPath
from typing import Any

from checkfreq.errors import CheckFreqError, StateError, printable
from checkfreq.state.classes import (
    Classes,
    can_be_made,
    fields_of,
    is_frozen,
    is_member,
    made,
    member,
    name_of,
)
from checkfreq.types import Json

#: ``leaf(value, path)``: the tagged object for ``value``, or None to decline.
EncodeLeaf = Callable[[Any, str], dict[str, Json] | None]
#: ``leaf(tag, node)``: the value of a tagged object this module does not know.
DecodeLeaf = Callable[[str, dict[str, Json]], Any]

_SAFE_INT_BITS = 63
#: Containers within containers. Decoding takes three nested calls for each, of 1000 that Python
#: allows.
MAX_DEPTH = 100
#: Lists of so many numbers are packed.
_LONG = 64
#: The codes of ``array`` that they can have, by type, the shortest first.
_CODES: dict[type, str] = {int: "iq", float: "d", bool: "b"}
#: NumPy's names of dtypes of plain values, without objects and fields.
_NUMPY_DTYPE = re.compile(
    r"[<>|=](b1|[iu][1248]|f2|f4|f8|f16|c8|c16|c32|[SUV][0-9]{1,9}"
    r"|[mM]8(\[[0-9]{0,9}[A-Za-z\u03bc]{1,7}\])?)"
)
_FACTORIES: dict[str, Any] = {
    "none": None,
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}


def encode_tree(
    value: object, path: str, *, leaf: EncodeLeaf | None = None, classes: Classes | None = None
) -> Json:
    """JSON for ``value``; errors call it ``path`` ("optimizer.param_groups[0]").

    Objects of ``classes`` are kept. Raises StateError with the path of the first part that cannot
    be kept exactly.
    """
    return _Encoder(leaf, classes).encode(value, path)


class _Encoder:
    def __init__(self, leaf: EncodeLeaf | None, classes: Classes | None) -> None:
        self._leaf = leaf
        self._classes = classes
        self._open: set[int] = set()
        self._is_key = False

    def encode(self, value: Any, path: str) -> Json:
        kind = type(value)
        if kind is bool or value is None:
            return value
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            return scalar(value)
        container = _CONTAINERS.get(kind)
        if container is not None:
            return self._container(container, value, path)
        return self._other(value, path)

    def _container(
        self, encode: Callable[[_Encoder, Any, str], Json], value: Any, path: str
    ) -> Json:
        if id(value) in self._open:
            raise StateError(f"{path} contains itself; state must be a tree")
        if len(self._open) == MAX_DEPTH:
            raise StateError(
                f"{path:.200}: nested deeper than the {MAX_DEPTH} containers within one another "
                "that can be kept; flatten it in state_dict()"
            )
        self._open.add(id(value))
        try:
            return encode(self, value, path)
        finally:
            self._open.discard(id(value))

    def _other(self, value: Any, path: str) -> Json:
        node = self._leaf(value, path) if self._leaf is not None else None
        if node is None:
            node = _numpy_node(value)
        if node is None and self._classes is not None:
            node = self._object(value, path, self._classes)
        if node is None:
            raise StateError(
                f"{path}: type {_type_name(value)} cannot be kept without pickle; expected "
                "numbers, strings, tensors, NumPy arrays and plain containers of them. Convert "
                "it in state_dict(), or leave it out"
            )
        return node

    def _object(self, value: Any, path: str, classes: Classes) -> Json:
        kind = type(value)
        if not classes.holds(kind):
            return None
        if is_member(value):
            return {"$member": name_of(kind), "name": value.name}
        # A key is hashed, by a method of its own class: no state may do that.
        if self._is_key or not can_be_made(value):
            return None
        is_shared = isinstance(value, tuple) or is_frozen(kind)
        first = path if is_shared else classes.first_place(value, path)
        if first != path:
            raise StateError(
                f"{path} is the same {_type_name(value)} as {first}, and would be two after a "
                "restore; keep it once"
            )
        fields = self._container(_Encoder.mapping, fields_of(value), path)
        return {"$object": name_of(kind), "fields": fields}

    def sequence(self, values: Sequence[Any], path: str) -> Json:
        if len(values) >= _LONG and (packed := _packed(values)) is not None:
            return packed
        return [self.encode(value, f"{path}[{i}]") for i, value in enumerate(values)]

    def mapping(self, value: dict[Any, Any], path: str) -> Json:
        if all(type(key) is str and key[:1] != "$" and key.isascii() for key in value):
            return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
        return {"$dict": self.pairs(value, path)}

    def pairs(self, value: dict[Any, Any], path: str) -> list[Json]:
        return [
            [self._key(key, f"{path} key {key!r}"), self.encode(item, f"{path}[{key!r}]")]
            for key, item in value.items()
        ]

    def _key(self, value: Any, path: str) -> Json:
        was, self._is_key = self._is_key, True
        try:
            return self.encode(value, path)
        finally:
            self._is_key = was

    def members(self, value: Iterable[Any], path: str) -> list[Json]:
        # The order of a set differs between processes: sorted, equal state is equal JSON.
        return sorted((self._key(item, f"{path} member") for item in value), key=repr)

    def default(self, value: defaultdict[Any, Any], path: str) -> Json:
        name = _FACTORY_NAMES.get(value.default_factory)
        if name is None:
            raise StateError(
                f"{path}: a defaultdict of {value.default_factory!r} cannot be kept without "
                f"pickle; expected one of {', '.join(_FACTORIES)}. Convert it to a dict"
            )
        return {"$defaultdict": self.pairs(value, path), "factory": name}


def _packed(values: Sequence[Any]) -> Json:
    """Numbers that are all of one type, in as few bytes as fit; None for anything else."""
    kinds = set(map(type, values))
    if len(kinds) != 1:
        return None
    for code in _CODES.get(kinds.pop(), ""):
        with contextlib.suppress(OverflowError):
            return {"$packed": code, "data": _base64(array(code, values).tobytes())}
    return None


def _int(value: int) -> Json:
    return value if value.bit_length() <= _SAFE_INT_BITS else {"$int": hex(value)}


def _float(value: float) -> Json:
    if math.isfinite(value):
        return value
    if math.isinf(value):
        return {"$float": "inf" if value > 0 else "-inf"}
    return {"$float": struct.pack(">d", value).hex()}  # a NaN keeps its sign and payload


def _str(value: str) -> Json:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, as in undecodable file names
        return {"$str": _base64(value.encode("utf-16-le", "surrogatepass"))}
    return value


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _type_name(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _numpy_node(value: Any) -> dict[str, Json] | None:
    numpy = sys.modules.get("numpy")  # if it is not loaded, ``value`` is none of its types
    if numpy is None:
        return None
    if isinstance(value, numpy.dtype):
        plain = value.fields is None and not value.hasobject and value.subdtype is None
        return {"$numpy.dtype": value.str} if plain else None
    scalar = isinstance(value, numpy.generic)
    if not scalar and type(value) is not numpy.ndarray:
        return None
    if value.dtype.hasobject or value.dtype.fields is not None:
        return None
    node: dict[str, Json] = {"$numpy": value.dtype.str, "data": _base64(value.tobytes())}
    if not scalar:
        node["shape"] = list(value.shape)
    return node


_SCALARS: dict[type, Callable[[Any], Json]] = {
    int: _int,
    float: _float,
    str: _str,
    complex: lambda v: {"$complex": [_float(v.real), _float(v.imag)]},
    bytes: lambda v: {"$bytes": _base64(v)},
    bytearray: lambda v: {"$bytearray": _base64(v)},
    timedelta: lambda v: {"$timedelta": [v.days, v.seconds, v.microseconds]},
    PosixPath: lambda v: {"$path": _str(str(v))},
    PurePosixPath: lambda v: {"$purepath": _str(str(v))},
    range: lambda v: {"$range": [v.start, v.stop, v.step]},
    type(Ellipsis): lambda v: {"$ellipsis": True},
}

_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Json]] = {
    list: _Encoder.sequence,
    dict: _Encoder.mapping,
    tuple: lambda e, v, p: {"$tuple": e.sequence(v, p)},
    OrderedDict: lambda e, v, p: {"$OrderedDict": e.pairs(v, p)},
    Counter: lambda e, v, p: {"$Counter": e.pairs(v, p)},
    defaultdict: _Encoder.default,
    deque: lambda e, v, p: {"$deque": e.sequence(v, p), "maxlen": v.maxlen},
    set: lambda e, v, p: {"$set": e.members(v, p)},
    frozenset: lambda e, v, p: {"$frozenset": e.members(v, p)},
    slice: lambda e, v, p: {"$slice": e.sequence((v.start, v.stop, v.step), p)},
}


def decode_tree(
    node: Json, *, leaf: DecodeLeaf | None = None, classes: Classes | None = None
) -> Any:
    """The value that ``encode_tree`` was given.

    Without ``classes`` there is plain data in place of their objects: a dict of what each consists
    of, and the name of a member of an enum. Raises ValueError if ``node`` is not JSON that
    ``encode_tree`` makes, or has a tag of a newer version, and StateError for a class that is not
    at hand. Errors that ``leaf`` raises become ValueError, except checkfreq's own.
    """
    try:
        return _Decoder(leaf, classes).decode(node)
    except CheckFreqError:
        raise
    except _MALFORMED as error:
        text = f"malformed state: {type(error).__name__}: {printable(str(error))[:200]}"
        raise ValueError(text) from error


#: What the decoders, NumPy and torch raise for JSON of an unexpected shape.
_MALFORMED: tuple[type[Exception], ...] = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    struct.error,
)


class _Decoder:
    def __init__(self, leaf: DecodeLeaf | None, classes: Classes | None) -> None:
        self._leaf = leaf
        self._classes = classes

    def decode(self, node: Json) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.decode(item) for key, item in node.items()}
        known = _DECODERS.get(tag)
        if known is not None:
            return known(self, node)
        if self._leaf is None:
            raise ValueError(f"unknown tag {tag!r}: written by a newer checkfreq?")
        return self._leaf(tag, node)

    def pairs(self, pairs: list[Json]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in pairs]

    def member(self, node: dict[str, Json]) -> Any:
        if self._classes is None:
            return str(node["name"])
        return member(self._classes.find(node["$member"]), node["name"])

    def object(self, node: dict[str, Json]) -> Any:
        fields = dict(self.decode(node["fields"]))
        return (
            fields if self._classes is None else made(self._classes.find(node["$object"]), fields)
        )


def _decode_packed(node: dict[str, Json]) -> list[Any]:
    code = node["$packed"]
    if code not in ("i", "q", "d", "b"):
        raise ValueError(f"expected a code of numbers, got {code!r:.80}")
    values: list[Any] = array(code, base64.b64decode(node["data"])).tolist()
    return [*map(bool, values)] if code == "b" else values


def _decode_float(text: str) -> float:
    if text in ("inf", "-inf"):
        return float(text)
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


def _decode_numpy(node: dict[str, Json]) -> Any:
    import numpy

    array = numpy.frombuffer(base64.b64decode(node["data"]), dtype=_decode_dtype(node["$numpy"]))
    if "shape" not in node:
        return array[0]
    if not all(type(size) is int and size >= 0 for size in node["shape"]):
        raise ValueError("expected the shape of an array")
    return array.reshape(node["shape"]).copy()


def _decode_dtype(name: Json) -> Any:
    """A NumPy dtype from a closed set: ``numpy.dtype`` would accept objects and records too."""
    import numpy

    if not isinstance(name, str) or _NUMPY_DTYPE.fullmatch(name) is None:
        raise ValueError(f"expected the name of a NumPy dtype, got {name!r:.80}")
    return numpy.dtype(name)


_DECODERS: dict[str, Callable[[_Decoder, dict[str, Json]], Any]] = {
    "$int": lambda d, n: int(n["$int"], 16),
    "$float": lambda d, n: _decode_float(n["$float"]),
    "$str": lambda d, n: base64.b64decode(n["$str"]).decode("utf-16-le", "surrogatepass"),
    "$complex": lambda d, n: complex(*d.decode(n["$complex"])),
    "$bytes": lambda d, n: base64.b64decode(n["$bytes"]),
    "$bytearray": lambda d, n: bytearray(base64.b64decode(n["$bytearray"])),
    "$timedelta": lambda d, n: timedelta(*n["$timedelta"]),
    "$path": lambda d, n: Path(d.decode(n["$path"])),
    "$purepath": lambda d, n: PurePath(d.decode(n["$purepath"])),
    "$range": lambda d, n: range(*n["$range"]),
    "$ellipsis": lambda d, n: ...,
    "$dict": lambda d, n: dict(d.pairs(n["$dict"])),
    "$tuple": lambda d, n: tuple(d.decode(n["$tuple"])),
    "$OrderedDict": lambda d, n: OrderedDict(d.pairs(n["$OrderedDict"])),
    "$Counter": lambda d, n: Counter(dict(d.pairs(n["$Counter"]))),
    "$defaultdict": lambda d, n: defaultdict(_FACTORIES[n["factory"]], d.pairs(n["$defaultdict"])),
    "$deque": lambda d, n: deque(d.decode(n["$deque"]), n["maxlen"]),
    "$set": lambda d, n: set(d.decode(n["$set"])),
    "$frozenset": lambda d, n: frozenset(d.decode(n["$frozenset"])),
    "$slice": lambda d, n: slice(*d.decode(n["$slice"])),
    "$packed": lambda d, n: _decode_packed(n),
    "$member": _Decoder.member,
    "$object": _Decoder.object,
    "$numpy": lambda d, n: _decode_numpy(n),
    "$numpy.dtype": lambda d, n: _decode_dtype(n["$numpy.dtype"]),
}
