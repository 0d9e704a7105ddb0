"""Objects with ``state_dict()`` and ``load_state_dict()``; dicts and lists restored in place."""

from __future__ import annotations

import contextlib
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
from checkfreq.state.adapters.composed_load import ComposedLoad
from checkfreq.state.adapters.fitting import misfits, only_known, state_of
from checkfreq.state.adapters.trees import Refill, tensors_in
from checkfreq.state.classes import Classes
from checkfreq.state.codec import decode_tree
from checkfreq.state.collector import StateCollector
from checkfreq.state.composed import is_composed
from checkfreq.state.dtensors import is_dtensor, tensor_types
from checkfreq.state.given import FirstGiven, given_to_scheduler
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

    def __init__(self, name: str, value: Stateful, *, is_scheduler: bool = False) -> None:
        self._name = name
        self._value = value
        given = given_to_scheduler(state_of(value)) if is_scheduler else None
        self._given = None if given is None else FirstGiven(given)

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """See Adapter."""
        collector.classes = Classes(type(self._value))
        tree = collector.encode(self._value.state_dict(), self._name)
        collector.made_anew()
        json = {"kind": self.kind, "class": type_name(self._value), "tree": tree}
        return json if self._given is None else {**json, "given": self._given.json}

    def holdings(self) -> Holdings:
        """See Adapter."""
        return _holdings(live_dtensors(self._name, self._state))

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """See Adapter."""
        saved.classes = Classes(type(self._value))
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
        changes = Changes(fallible=[Fallible(self._name, self._keep, partial(self._load, saved))])
        if self._given is not None:
            given = given_to_scheduler(state)
            self._given.compare(self._name, saved, given, findings)
            changes.sets.append(partial(self._given.take_up, saved, given))
        return changes

    def _keep(self) -> Callable[[], None]:
        return partial(self._value.load_state_dict, deepcopy(self._value.state_dict()))

    def _load(self, saved: SavedObject) -> None:
        live = live_dtensors(self._name, self._state)
        state = saved.decode(saved.json.get("tree"), live=live)
        self._value.load_state_dict(only_known(self._value, state))

    def _state(self) -> Any:
        return self._value.state_dict()


class _ContainerAdapter:
    """A container that stays the same object; tensors in it that fit are written in place."""

    kind: str

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        self._value = value

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """See Adapter."""
        collector.classes = Classes(type(self._value))
        tree = collector.encode(self._plain(), self._name)
        collector.made_anew()
        return {"kind": self.kind, "class": type_name(self._value), "tree": tree}

    def holdings(self) -> Holdings:
        """See Adapter."""
        return _holdings(live_dtensors(self._name, self._plain))

    def _plain(self) -> Any:
        """The value without its subclass."""
        raise NotImplementedError


class DictAdapter(_ContainerAdapter):
    """A plain dict."""

    kind = "dict"

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """See Adapter."""
        load = _TreeLoad(self._name, self._plain(), saved, Classes(type(self._value)))
        for key, node in _items(saved):
            live = self._value.get(key)
            is_kept = isinstance(node, dict) and node.get("$object") == type_name(live)
            if callable(live) and not is_kept:
                text = f"{self._name}[{key!r:.80}]: live is something callable"
                findings.different.append(text)
        return load.changes(lambda refill, new: refill.fill_dict(self._value, dict(new)))

    def _plain(self) -> dict[Any, Any]:
        return dict(self._value)


class ListAdapter(_ContainerAdapter):
    """A plain list, such as a history."""

    kind = "list"

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """See Adapter."""
        load = _TreeLoad(self._name, self._plain(), saved, Classes(type(self._value)))
        return load.changes(lambda refill, new: refill.fill_list(self._value, new))

    def _plain(self) -> list[Any]:
        return list(self._value)


class _TreeLoad:
    """One load of a container: its tensors that fit are filled, and all other values made anew."""

    def __init__(self, name: str, live: Any, saved: SavedObject, classes: Classes) -> None:
        self._name = name
        self._saved = saved
        self._classes = saved.classes = classes
        self._tree = saved.field("tree")
        self._dtensors = live_dtensors(name, lambda: live)
        self._composed = ComposedLoad(saved)
        #: By id of its node in the tree, each live tensor that stays; by its own id, what fills it.
        self._kept: dict[int, Tensor] = {}
        self._filled: dict[int, Filled] = {}
        self._placed: dict[int, str] = {}
        saved.check(self._tree, live=self._dtensors)
        found = [*tensors_in(self._tree, live, saved.check)]
        self._composed.compare((node["$tensor"], value) for node, value in found)
        for node, value in found:
            if isinstance(value, Tensor) and self._place(node["$tensor"], value):
                self._kept[id(node)] = value
        decode_tree(self._tree, leaf=self._ask, classes=self._classes)

    def changes(self, fill: Callable[[Refill, Any], None]) -> Changes:
        """The changes; ``fill`` gives the live container its new content."""

        def apply() -> None:
            new = decode_tree(self._tree, leaf=self._leaf, classes=self._classes)
            fill(Refill(), new)

        filled = [*self._filled.values(), *self._composed.filled]
        sets = [*self._composed.sets, apply]
        return Changes(fallible=self._composed.fallible, filled=filled, sets=sets)

    def _place(self, key: str, live: Tensor) -> bool:
        """Arrange for a live tensor to be filled; False if it cannot hold the saved one."""
        path = f"{self._name}.{key}"
        if key in self._saved.composed:
            other = self._placed.get(id(live), key)
            if other != key or not self._composed.fits(key, live):  # it cannot hold two saved ones
                return False
            if id(live) not in self._placed:
                self._composed.place(key, live)
            self._placed[id(live)] = key
            return True
        record = self._saved.record(key)
        fits = (
            tuple(live.shape) == record.shape
            and live.dtype == DTYPES[record.dtype]
            and not is_composed(live)
            and (live.requires_grad or record.has_strides_of(live))  # a parameter keeps its own
            and is_dtensor(live) == (self._dtensors.get(key) is not None)
        )
        if not fits:
            return False
        filled = self._filled.setdefault(id(live), Filled(path, live, record))
        return filled.saved is record

    def _ask(self, tag: str, node: dict[str, Json]) -> Any:
        """Have everything read that is not at its place."""
        if id(node) in self._kept:
            return None
        if tag == "$tensor" and node[tag] in self._saved.composed:
            return self._composed.ask(node[tag], node.get("device", "cpu"))
        return self._saved.own_tree(node, live=self._dtensors)

    def _leaf(self, tag: str, node: dict[str, Json]) -> Any:
        if id(node) in self._kept:
            return self._kept[id(node)]
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
