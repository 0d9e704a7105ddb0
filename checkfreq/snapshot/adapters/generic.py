"""Anything with ``state_dict()`` and ``load_state_dict()``, and plain dicts restored in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from checkfreq.snapshot.adapters.base import Changes, Fallible, Findings, Saved, type_name
from checkfreq.snapshot.sink import Sink
from checkfreq.snapshot.tensors import copy_bits
from checkfreq.types import Json


class Stateful(Protocol):
    """The contract of torch's own stateful objects."""

    def state_dict(self) -> Any:
        """The state; calling it changes nothing."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a state."""
        ...


class ObjectAdapter:
    """An object known only by its two methods."""

    kind = "object"

    def __init__(self, name: str, value: Stateful) -> None:
        self._name = name
        self._value = value

    def capture(self, sink: Sink) -> dict[str, Json]:
        """See Adapter."""
        tree = sink.encode(self._value.state_dict(), self._name)
        return {"kind": self.kind, "class": type_name(self._value), "tree": tree}

    def prepare(self, saved: Saved, findings: Findings) -> Changes:
        """See Adapter."""
        saved.check(saved.json.get("tree"))
        live, was = type_name(self._value), saved.field("class")
        # Schedulers take any dict without complaint and misbehave later.
        if isinstance(self._value, LRScheduler) and live != was:
            findings.different.append(f"{self._name}: checkpoint is of a {was}, live is a {live}")
            return Changes()
        return Changes(fallible=[Fallible(self._name, self._keep, partial(self._load, saved))])

    def _keep(self) -> Callable[[], None]:
        return partial(self._value.load_state_dict, deepcopy(self._value.state_dict()))

    def _load(self, saved: Saved) -> None:
        self._value.load_state_dict(saved.decode(saved.json.get("tree")))


class DictAdapter:
    """A plain dict: the dict itself stays, and tensors in it that fit are written in place."""

    kind = "dict"

    def __init__(self, name: str, value: dict[Any, Any]) -> None:
        self._name = name
        self._value = value

    def capture(self, sink: Sink) -> dict[str, Json]:
        """See Adapter."""
        tree = sink.encode(dict(self._value), self._name)
        return {"kind": self.kind, "class": type_name(self._value), "tree": tree}

    def prepare(self, saved: Saved, findings: Findings) -> Changes:
        """See Adapter."""
        saved.check(saved.field("tree"))
        return Changes(copies=[partial(self._load, saved)])

    def _load(self, saved: Saved) -> None:
        new = saved.decode(saved.field("tree"))
        written: set[int] = set()
        for key, value in new.items():
            live = self._value.get(key)
            if isinstance(live, Tensor) and _fits(live, value) and id(live) not in written:
                written.add(id(live))
                with torch.no_grad():
                    copy_bits(live, value)
                new[key] = live
        # Never a subclass's own methods, which may raise; an OrderedDict keeps its order apart.
        plain = OrderedDict if isinstance(self._value, OrderedDict) else dict
        plain.clear(self._value)
        plain.update(self._value, new)


def _fits(live: Tensor, value: Any) -> bool:
    return isinstance(value, Tensor) and live.shape == value.shape and live.dtype == value.dtype


def tree_value(saved: Saved) -> Any:
    """The state dict of an object, or the content of a dict; tensors on the CPU."""
    return saved.decode(saved.json.get("tree"), on_cpu=True)
