"""Objects with ``state_dict()`` and ``load_state_dict()``, and plain dicts restored in place."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from checkfreq.errors import StateError
from checkfreq.state.adapters.base import (
    Changes,
    Fallible,
    Findings,
    Holdings,
    type_name,
)
from checkfreq.state.adapters.fitting import misfits, only_known
from checkfreq.state.collector import StateCollector
from checkfreq.state.dtensors import is_dtensor, local_of, tensor_types
from checkfreq.state.saved import SavedObject, copy_bits, local_part
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
        state = saved.check(saved.json.get("tree"), live=live_dtensors(self._name, self._state))
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
        state = saved.check(saved.field("tree"), live=live_dtensors(self._name, self._state))
        for key in [key for key in state if callable(self._value.get(key))]:
            findings.different.append(f"{self._name}[{key!r:.80}]: live is something callable")
        return Changes(copies=[partial(self._load, saved)])

    def _load(self, saved: SavedObject) -> None:
        live = live_dtensors(self._name, self._state)
        new = saved.decode(saved.field("tree"), live=live)
        written: set[int] = set()
        for key, value in new.items():
            old = self._value.get(key)
            if isinstance(old, Tensor) and _fits(old, value) and id(old) not in written:
                written.add(id(old))
                with torch.no_grad():
                    copy_bits(local_of(old), local_of(value))
                new[key] = old
        # Not the methods of a subclass, which may raise. An OrderedDict has its own record of the
        # order, so dict's methods would corrupt it.
        plain = OrderedDict if isinstance(self._value, OrderedDict) else dict
        plain.clear(self._value)
        plain.update(self._value, new)

    def _state(self) -> dict[Any, Any]:
        return dict(self._value)


def _fits(live: Tensor, value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and live.shape == value.shape
        and live.dtype == value.dtype
        and is_dtensor(live) == is_dtensor(value)
    )


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
