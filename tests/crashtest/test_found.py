"""What a walk through the user's variables finds, and that it runs no code of theirs."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

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


def test_counters_of_functions_and_generators_are_found() -> None:
    def counting() -> Iterator[int]:
        number = 1
        while True:
            yield number
            number += 1

    def closed() -> Callable[[], int]:
        calls = 4

        def function() -> int:
            nonlocal calls
            calls += 1
            return calls

        return function

    batches = counting()
    next(batches)
    next(batches)
    assert found("batches", batches).values == {"batches.number": "2"}
    assert found("rate", closed()).values == {"rate.calls": "4"}


def test_arrays_and_tensors_are_found_but_not_what_was_computed_from_parameters() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert [*found("log_alpha", weight).values] == ["log_alpha"]
    assert found("loss", weight.sum()).values == {}
    one, other = (found("a", np.array([1.0, n])).values["a"] for n in (2, 3))
    assert one.startswith("float64[2] ")
    assert one != other
    assert found("n", np.int64(3)).values == {"n": "3"}


def test_flags_and_numbers_of_modules_are_found() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))
    model[0].weight.requires_grad_(False)
    one = found("model", model)
    assert one.objects == {"model": model}
    values = one.values
    assert (values["model.0.weight.requires_grad"], values["model.0.bias.requires_grad"]) == (
        "False",
        "True",
    )
    assert (values["model.1.training"], values["model.1.p"]) == ("True", "0.5")
