"""Objects with ``state_dict()`` and ``load_state_dict()``, and plain dicts restored in place."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from checkfreq.errors import StateError
from checkfreq.state.adapters.base import (
    Changes,
    Fallible,
    Filled,
    Findings,
    Holdings,
    type_name,
)
from checkfreq.state.adapters.fitting import misfits, only_known
from checkfreq.state.collector import StateCollector
from checkfreq.state.dtensors import is_dtensor, tensor_types
from checkfreq.state.saved import SavedObject
from checkfreq.state.saved_tensor import local_part
from checkfreq.state.tensors import DTYPES
from checkfreq.store.boxes import Box
from checkfreq.types import Json


class Stateful(Protocol):
    """The contract of torch's own stateful objects."""

    def state_dict(self) -> Any:
        """The state; must have no side effects."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Load a state."""
        ...


class ObjectAdapter:
    """An object of which only the two methods are known."""

    kind = "object"

    def __init__(self, name: str, value: Stateful) -> None:
        self._name = name
        self._value = value

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """See Adapter."""
        tree = collector.encode(self._value.state_dict(), self._name)
        return {"kind": self.kind, "class": type_name(self._value), "tree": tree}

    def holdings(self) -> Holdings:
        """See Adapter."""
        return _holdings(live_dtensors(self._name, self._state))

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """See Adapter."""
        dtensors = live_dtensors(self._name, self._state)
        state = saved.own_tree(saved.json.get("tree"), live=dtensors)
        live, was = type_name(self._value), saved.field("class")
        # Schedulers load any dict without complaint and misbehave later.
        if isinstance(self._value, LRScheduler) and live != was:
            findings.different.append(f"{self._name}: checkpoint is of a {was}, live is a {live}")
            return Changes()
        if unfit := list(misfits(self._name, self._value, state)):
            findings.different += unfit
            return Changes()
        return Changes(fallible=[Fallible(self._name, self._keep, partial(self._load, saved))])

    def _keep(self) -> Callable[[], None]:
        return partial(self._value.load_state_dict, deepcopy(self._value.state_dict()))

    def _load(self, saved: SavedObject) -> None:
        live = live_dtensors(self._name, self._state)
        state = saved.decode(saved.json.get("tree"), live=live)
        self._value.load_state_dict(only_known(self._value, state))

    def _state(self) -> Any:
        return self._value.state_dict()


class DictAdapter:
    """A plain dict, which stays the same object; tensors in it that fit are written in place."""

    kind = "dict"

    def __init__(self, name: str, value: dict[Any, Any]) -> None:
        self._name = name
        self._value = value

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """See Adapter."""
        tree = collector.encode(dict(self._value), self._name)
        return {"kind": self.kind, "class": type_name(self._value), "tree": tree}

    def holdings(self) -> Holdings:
        """See Adapter."""
        return _holdings(live_dtensors(self._name, self._state))

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """See Adapter."""
        load = _DictLoad(self._name, self._value, saved)
        load.compare(findings)
        return Changes(filled=load.filled, sets=[load.apply])

    def _state(self) -> dict[Any, Any]:
        return dict(self._value)


class _DictLoad:
    """One load of a dict: its tensors that fit are filled, and all other values are made anew."""

    def __init__(self, name: str, live: dict[Any, Any], saved: SavedObject) -> None:
        self._name = name
        self._live = live
        self._saved = saved
        self._dtensors = live_dtensors(name, lambda: dict(live))
        self._items = _items(saved)
        self._kept: dict[Any, Filled] = {}

    def compare(self, findings: Findings) -> None:
        """Find out which tensors stay, and ask for the others."""
        for key, node in self._items:
            self._saved.check(node, live=self._dtensors)
            if callable(self._live.get(key)):
                text = f"{self._name}[{key!r:.80}]: live is something callable"
                findings.different.append(text)
            if (filled := self._fitting(key, node)) is not None:
                self._kept[key] = filled
            else:
                self._saved.own_tree(node, live=self._dtensors)

    @property
    def filled(self) -> list[Filled]:
        """The tensors that stay, each once."""
        return [*{id(one.tensor): one for one in self._kept.values()}.values()]

    def _fitting(self, key: Any, node: Json) -> Filled | None:
        live = self._live.get(key)
        if not isinstance(live, Tensor) or not isinstance(node, dict) or "$tensor" not in node:
            return None
        record = self._saved.record(node["$tensor"])
        split_as = self._dtensors.get(node["$tensor"])
        fits = (
            tuple(live.shape) == record.shape
            and live.dtype == DTYPES[record.dtype]
            and is_dtensor(live) == (split_as is not None)
        )
        # One live tensor cannot hold two saved ones.
        shares = any(o.tensor is live and o.saved is not record for o in self._kept.values())
        return Filled(f"{self._name}[{key!r:.80}]", live, record) if fits and not shares else None

    def apply(self) -> None:
        """Set every entry; the tensors that stay have been filled."""
        new = {
            key: self._kept[key].tensor if key in self._kept else self._decode(node)
            for key, node in self._items
        }
        # Not the methods of a subclass, which may raise. An OrderedDict has its own record of the
        # order, so dict's methods would corrupt it.
        plain = OrderedDict if isinstance(self._live, OrderedDict) else dict
        plain.clear(self._live)
        plain.update(self._live, new)

    def _decode(self, node: Json) -> Any:
        return self._saved.decode(node, live=self._dtensors)


def _items(saved: SavedObject) -> list[tuple[Any, Json]]:
    """The keys of a saved dict, and the nodes of its values."""
    tree = saved.field("tree")
    tag = next(iter(tree), "") if isinstance(tree, dict) else "$"
    if not tag.startswith("$"):
        return [*tree.items()]
    if tag not in ("$dict", "$OrderedDict"):
        raise saved.corrupt("content of a dict", "keys and values", f"{tree!r:.80}")
    return [(saved.decode(key), node) for key, node in tree[tag]]


def live_dtensors(name: str, state: Callable[[], Any]) -> Mapping[str, Tensor]:
    """The DTensors in an object's state, by the keys that they would have in its file.

    ``state()`` is called only if there can be any.
    """
    if len(tensor_types()) == 1:
        return {}
    collector = StateCollector()
    collector.start(name)
    with contextlib.suppress(StateError):  # state that cannot be kept ends the search
        collector.encode(state(), name)
    return {key: tensor for (_, key), tensor in collector.dtensors.items()}


def _holdings(live: Mapping[str, Tensor]) -> Holdings:
    def of(key: str, shape: tuple[int, ...]) -> Iterator[Box]:
        tensor = live.get(key)
        fits = tensor is not None and tuple(tensor.shape) == shape
        yield local_part(tensor)[1] if tensor is not None and fits else Box.whole(shape)

    return of


def tree_value(saved: SavedObject) -> Any:
    """The state dict of an object, or the content of a dict; tensors on the CPU."""
    return saved.decode(saved.json.get("tree"), on_cpu=True)
