"""Values as ``torch.load(weights_only=True)`` takes them, and back, exactly.

Tensors, numbers, texts, lists, tuples, dicts, OrderedDicts, Counters and sets are taken as they
are. What is not (a NumPy array, a deque, a path) becomes a dict with the tag that the manifest has
for it: ``{"$deque": [1, 2], "maxlen": 5}``. Tensors stay tensors inside of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.state.codec import MAX_DEPTH, decode_tree, encode_tree
from checkfreq.state.tensors import decode_torch, encode_torch

_AS_THEY_ARE = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
)
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


def from_plain(value: Any, *, depth: int = 0) -> Any:
    """The value that ``to_plain`` was given; raises ValueError for what is nested too deep."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} containers")

    def inner(one: Any) -> Any:
        return from_plain(one, depth=depth + 1)

    kind = type(value)
    if kind is dict and next(iter(value), None) in _TAGS:
        return _untagged(value, inner)
    if kind in (dict, OrderedDict):
        if not _changes(value.values()):
            return value
        return kind((key, inner(one)) for key, one in value.items())
    if kind in (list, tuple):
        return kind(inner(one) for one in value)
    return value


def _changes(values: Any) -> bool:
    return any(isinstance(one, dict | list | tuple) for one in values)


def _untagged(node: dict[str, Any], inner: Any) -> Any:
    tag = next(iter(node))
    if tag == "$ndarray":
        return decode_torch(tag, {**node, tag: "array"}, lambda *_: node[tag])
    if tag == "$deque":
        return deque((inner(one) for one in node[tag]), node["maxlen"])
    if tag == "$defaultdict":
        made = decode_tree({tag: [], "factory": node["factory"]})
        made.update((inner(key), inner(one)) for key, one in node[tag])
        return made
    if tag == "$frozenset":
        return frozenset(inner(one) for one in node[tag])
    if tag == "$slice":
        return slice(*(inner(one) for one in node[tag]))
    return decode_tree(node, leaf=lambda tag, node: decode_torch(tag, node, _no_tensor))


def _no_tensor(key: str, device: str) -> Tensor:
    raise ValueError(f"expected no tensor, got {key!r:.80}")
