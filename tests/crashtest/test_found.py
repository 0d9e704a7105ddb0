"""What a walk through the user's variables finds, and that it runs no code of theirs."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Any

import torch

from checkfreq.crashtest.found import Found


def found(name: str, value: Any) -> Found:
    one = Found()
    one.add(name, value)
    return one


class Refuses(OrderedDict[str, int]):
    """A mapping that raises when it is read, as lazy ones do."""

    def items(self) -> Any:
        raise ValueError("a model class that this version does not have")

    __iter__ = keys = values = __getitem__ = __getattr__ = __len__ = items  # type: ignore


class Proxy:
    """It answers every question about itself with an error."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("working outside of a context")


@dataclass(slots=True)
class Slotted:
    count: int


class Environment:
    def __init__(self) -> None:
        self.state = torch.ones(2)
        self._hidden = 3

    @property
    def costly(self) -> int:
        raise AssertionError("computed")


def test_containers_are_read_without_their_own_methods() -> None:
    lazy = Refuses()
    dict.__setitem__(lazy, "number", 3)
    assert found("mapping", lazy).values == {"mapping.number": "3"}
    assert found("proxy", Proxy()).values == {}
    assert found("deque", deque([1, 2])).values == {"deque.0": "1", "deque.1": "2"}


def test_what_objects_hold_is_found_and_nothing_is_computed() -> None:
    values = found("env", Environment()).values
    assert [*values] == ["env.state", "env._hidden"]
    assert found("slotted", Slotted(7)).values == {"slotted.count": "7"}
    assert found("partial", functools.partial(max)).objects == {}
