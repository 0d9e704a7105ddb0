"""A saved tree beside the live one: what is at the same place, and containers that stay the same.

Code may hold on to a dict or a list inside of tracked state, or to a tensor in it, such as an
optimizer over the leaves of a nested dict. So both stay the same objects where they fit.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from checkfreq.state.classes import fields_of, is_frozen, is_named_tuple, is_plain, made, name_of
from checkfreq.types import Json

#: ``decode(node)``: the value of a key.
Decode: TypeAlias = Callable[[Json], Any]

_DICTS = (dict, OrderedDict, defaultdict, Counter)
#: Tags of sequences, with the types that they stand for, and of dicts.
_SEQUENCES: dict[str, type] = {"$tuple": tuple, "$deque": deque}
_MAPPINGS = frozenset(("$dict", "$OrderedDict", "$defaultdict"))


def tensors_in(node: Json, live: Any, decode: Decode) -> Iterator[tuple[dict[str, Json], Any]]:
    """Each node of a tensor in a saved tree, and what is at its place in ``live``; None if nothing.

    Only lists, tuples, deques, dicts and objects are looked into, if both sides are of one type.
    """
    if isinstance(node, list):
        yield from _in_sequence(node, live if type(live) is list else (), decode)
    elif isinstance(node, dict):
        tag = next(iter(node), "")
        if tag == "$tensor":
            yield node, live
        elif tag in _SEQUENCES:
            yield from _in_sequence(
                node[tag], live if type(live) is _SEQUENCES[tag] else (), decode
            )
        elif tag == "$object":
            is_alike = name_of(type(live)) == node[tag] and _has_fields(type(live))
            yield from tensors_in(node["fields"], fields_of(live) if is_alike else None, decode)
        elif tag in _MAPPINGS:
            there = live if isinstance(live, dict) else {}
            for key, value in node[tag]:
                yield from tensors_in(value, dict.get(there, decode(key)), decode)
        elif not tag.startswith("$"):
            there = live if isinstance(live, dict) else {}
            for key, value in node.items():
                yield from tensors_in(value, dict.get(there, key), decode)


def _in_sequence(
    nodes: list[Json], live: Any, decode: Decode
) -> Iterator[tuple[dict[str, Json], Any]]:
    there = [*live, *[None] * (len(nodes) - len(live))]
    for node, value in zip(nodes, there, strict=False):
        yield from tensors_in(node, value, decode)


def _has_fields(kind: type) -> bool:
    return is_named_tuple(kind) or is_plain(kind)


class Refill:
    """Puts new content into live containers; each of them takes one content only."""

    def __init__(self) -> None:
        self._used: set[int] = set()

    def value(self, live: Any, new: Any) -> Any:
        """``live`` with the content of ``new`` if both are lists, deques, sets, dicts or objects
        of one type, else a new value; what is inside is treated in the same way."""
        kind = type(new)
        if id(live) in self._used or type(live) is not kind:
            return new
        if kind is tuple:
            return tuple(self._items(live, new))
        if is_named_tuple(kind):
            return made(kind, dict(zip(kind._fields, self._items(live, new), strict=True)))
        if kind is list:
            self.fill_list(live, new)
        elif kind is deque and live.maxlen == new.maxlen:
            self._used.add(id(live))
            items = self._items(live, new)
            live.clear()
            live.extend(items)
        elif kind is set:
            self._used.add(id(live))
            live.clear()
            live.update(new)
        elif is_plain(kind) and not is_frozen(kind):
            self.fill_dict(fields_of(live), fields_of(new))
        elif kind in _DICTS and getattr(live, "default_factory", 0) is getattr(
            new, "default_factory", 0
        ):
            self.fill_dict(live, new)
        else:
            return new
        return live

    def fill_list(self, live: list[Any], new: list[Any]) -> None:
        """Give a live list, or one of a subclass, the items of ``new``."""
        self._used.add(id(live))
        list.__setitem__(live, slice(None), self._items(live, new))

    def fill_dict(self, live: dict[Any, Any], new: dict[Any, Any]) -> None:
        """Give a live dict, or one of a subclass, the entries of ``new``, in their order."""
        self._used.add(id(live))
        content = {key: self.value(dict.get(live, key), value) for key, value in new.items()}
        # Not the methods of a subclass, which may raise. An OrderedDict has its own record of the
        # order, so dict's methods would corrupt it.
        plain = OrderedDict if isinstance(live, OrderedDict) else dict
        plain.clear(live)
        plain.update(live, content)

    def _items(self, live: Any, new: Any) -> list[Any]:
        there = [*live, *[None] * (len(new) - len(live))]
        return [self.value(one, item) for one, item in zip(there, new, strict=False)]
