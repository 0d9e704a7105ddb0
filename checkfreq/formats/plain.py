"""Values as ``torch.load(weights_only=True)`` takes them, and back, exactly.

Tensors, numbers, texts, lists, tuples, dicts, OrderedDicts, Counters and sets are taken as they
are. What is not (a NumPy array, a deque, a path) becomes a dict with the tag that the manifest has
for it: ``{"$deque": [1, 2], "maxlen": 5}``. Tensors stay tensors inside of it.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from checkfreq.errors import CorruptCheckpointError, StateError
from checkfreq.state.codec import MAX_DEPTH, decode_tree, encode_tree
from checkfreq.state.tensors import decode_torch, encode_torch

_AS_THEY_ARE = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
)
#: What the functions here raise for content that no export wrote.
MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    struct.error,
)
#: How much larger than what is in memory a file's values may be as a tree.
_MOST_GROWTH_BYTES = 128 << 20
#: What a reference to a value counts, small as the value may be.
_VALUE_BYTES = 32
#: Containers whose content may hold tensors.
_TAGGED = ("$deque", "$defaultdict", "$frozenset", "$slice")
#: Tags of values without tensors, and of arrays.
_TAGS = frozenset(
    (
        *(*_TAGGED, "$ndarray", "$numpy", "$numpy.dtype", "$timedelta", "$path", "$purepath"),
        *("$range", "$ellipsis", "$torch.memory_format", "$torch.layout"),
    )
)


def to_plain(value: Any, path: str, *, depth: int = 0) -> Any:
    """What is written for ``value``; StateError for a type that cannot be kept."""
    if depth > MAX_DEPTH:
        raise StateError(f"{path:.200}: nested deeper than {MAX_DEPTH} containers; flatten it")
    kind = type(value)

    def inner(one: Any, where: object) -> Any:
        return to_plain(one, f"{path}[{where!r:.80}]", depth=depth + 1)

    if kind in _AS_THEY_ARE:
        return value
    if kind in (dict, OrderedDict):
        return kind((inner(key, key), inner(one, key)) for key, one in value.items())
    if kind is Counter:
        return Counter({inner(key, key): inner(one, key) for key, one in value.items()})
    if kind in (list, tuple, set):
        return kind(inner(one, number) for number, one in enumerate(value))
    if kind is deque:
        items = [inner(one, number) for number, one in enumerate(value)]
        return {"$deque": items, "maxlen": value.maxlen}
    if kind is defaultdict:
        empty = encode_tree(defaultdict(value.default_factory), path)
        pairs = [[inner(key, key), inner(one, key)] for key, one in value.items()]
        return {"$defaultdict": pairs, "factory": empty["factory"]}
    if kind is frozenset:
        return {"$frozenset": [inner(one, "member") for one in value]}
    if kind is slice:
        return {"$slice": [inner(one, "slice") for one in (value.start, value.stop, value.step)]}
    return _tagged(value, path)


def _tagged(value: Any, path: str) -> Any:
    kept: dict[str, Tensor] = {}

    def add(tensor: Tensor, _: str) -> str:
        kept["array"] = tensor.clone()  # an array may be written to later
        return "array"

    node = encode_tree(value, path, leaf=lambda one, where: encode_torch(one, where, add))
    return {**node, "$ndarray": kept["array"]} if kept else node


def plain_in(content: Any, path: str) -> Any:
    """What ``to_plain`` was given for the content of a file that anyone may have written.

    Raises StateError for what is nested too deep, or grows too much, CorruptCheckpointError for
    what makes no sense.
    """
    try:
        _require_bounded(content, path)
        return _from_plain(content)
    except RecursionError:
        raise StateError(
            f"{path}: nested deeper than {MAX_DEPTH} containers, or within itself; flatten it "
            "before you save it"
        ) from None
    except StateError:
        raise
    except MALFORMED as error:
        raise CorruptCheckpointError(
            path,
            check="values",
            expected="the form that exports give them",
            got=f"{type(error).__name__}: {error!s:.200}",
        ) from None


def _require_bounded(content: Any, path: str) -> None:
    """Raise StateError for content that is far larger as a tree, such as forty lists of two of
    which each holds the next one twice."""
    trees: dict[int, int] = {}  # by identity
    held = 0

    def tree(value: Any) -> int:
        nonlocal held
        if (known := trees.get(id(value))) is not None:
            return known
        inner: list[Any] = []
        if isinstance(value, int):
            own = value.bit_length() // 4  # digits
        elif isinstance(value, str | bytes | bytearray):
            own = len(value)
        else:
            inner = [*value, *(value.values() if isinstance(value, dict) else ())]
            own = _VALUE_BYTES * len(inner)
        held += own
        total = own + sum(tree(one) for one in inner if _is_shared(one))
        trees[id(value)] = total
        return total

    found = tree([content])
    if found > (most := held + _MOST_GROWTH_BYTES):
        raise StateError(
            f"{path}: expected lists, dicts and texts that few places share, found some that would "
            f"grow to more than {most} bytes, since a manifest has a copy for each place. Save "
            "each once"
        )


def _is_shared(value: Any) -> bool:
    """Whether it can be at many places for the price of one; as for short texts, all pay alike."""
    if isinstance(value, str | bytes | bytearray):
        return len(value) > _VALUE_BYTES
    if isinstance(value, int):
        return value.bit_length() > 8 * _VALUE_BYTES
    return isinstance(value, dict | list | tuple | set | frozenset)


def _from_plain(value: Any) -> Any:
    kind = type(value)
    if kind is dict and next(iter(value), None) in _TAGS:
        return _untagged(value)
    if kind in (dict, OrderedDict):
        if not _changes(value.values()):
            return value
        return kind((key, _from_plain(one)) for key, one in value.items())
    if kind in (list, tuple):
        return kind(_from_plain(one) for one in value)
    return value


def _changes(values: Any) -> bool:
    return any(isinstance(one, dict | list | tuple) for one in values)


def _untagged(node: dict[str, Any]) -> Any:
    tag = next(iter(node))
    if tag == "$ndarray":
        return decode_torch(tag, {**node, tag: "array"}, lambda *_: node[tag])
    if tag == "$deque":
        return deque((_from_plain(one) for one in node[tag]), node["maxlen"])
    if tag == "$defaultdict":
        made = decode_tree({tag: [], "factory": node["factory"]})
        made.update((_from_plain(key), _from_plain(one)) for key, one in node[tag])
        return made
    if tag == "$frozenset":
        return frozenset(_from_plain(one) for one in node[tag])
    if tag == "$slice":
        return slice(*(_from_plain(one) for one in node[tag]))
    return decode_tree(node, leaf=lambda tag, node: decode_torch(tag, node, _no_tensor))


def _no_tensor(key: str, device: str) -> Tensor:
    raise ValueError(f"expected no tensor, got {key!r:.80}")
