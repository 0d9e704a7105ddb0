"""Objects inside of state: exact if their class is at hand and they are their attributes alone."""

from __future__ import annotations

import enum
import sys
from argparse import Namespace
from collections import deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import CorruptCheckpointError, StateError
from tests.state.support import Shot, bits, plan, restore, take


class Norm(enum.IntEnum):
    AUTO = 1
    SIGN = 4


class Mode(enum.Flag):
    FAST = enum.auto()
    SAFE = enum.auto()


class Step(NamedTuple):
    state: Tensor
    action: int


@dataclass
class Average:
    total: float = 0.0
    values: list[Tensor] = field(default_factory=list)
    norm: Norm = Norm.AUTO


@dataclass(frozen=True)
class Limits:
    low: float
    high: float


class Projector:
    """As in GaLore: numbers and a matrix, and no function of its own for copies."""

    def __init__(self) -> None:
        self.matrix: Tensor | None = None
        self.last_step = -1

    def __call__(self) -> None: ...


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Custom:
    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: Any) -> None: ...


class Constant:
    """An object of it is compared by identity."""


class Holder:
    """A tracked object; ``load_state_dict`` takes what it gets."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def through(state: dict[str, Any]) -> dict[str, Any]:
    fresh = Holder({})
    restore(CFCheckpoint(held=fresh), take(CFCheckpoint(held=Holder(state))))
    return fresh.state


def told(value: Any) -> Any:
    """Everything that must be equal about a value, with its type."""
    if isinstance(value, dict):
        return [(told(key), told(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), getattr(value, "maxlen", None), [*map(told, value)]
    if hasattr(value, "__dict__") and not isinstance(value, enum.Enum | Tensor):
        return type(value), told(vars(value))
    return type(value), bits(value)


def test_members_tuples_and_objects_come_back_as_they_were() -> None:
    projector = Projector()
    projector.matrix, projector.last_step = torch.arange(4.0), 3
    state = {
        "norm": Norm.SIGN,
        "mode": Mode.SAFE,
        "by_norm": {Norm.AUTO: 1, Norm.SIGN: 2},
        "memory": deque([Step(torch.ones(2), 1), Step(torch.zeros(2), 0)], maxlen=5),
        "average": Average(0.5, [torch.ones(3)], Norm.SIGN),
        "limits": Limits(-1.0, float("inf")),
        "projector": projector,
    }
    assert told(through(state)) == told(state)


class Projected(torch.optim.SGD):
    """An optimizer that keeps an object for each parameter from its first step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                projector = self.state[parameter].setdefault("projector", Projector())
                if projector.matrix is None:
                    projector.matrix = torch.zeros_like(parameter)
                projector.matrix += parameter.grad
                projector.last_step += group["norm"]
                parameter.data -= projector.matrix * projector.last_step


def trained(steps: int) -> tuple[nn.Linear, Projected, Callable[[], None]]:
    torch.manual_seed(steps)
    model = nn.Linear(3, 2)
    optimizer = Projected(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["norm"] = Norm.SIGN

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    return model, optimizer, step


@pytest.mark.parametrize("stray", [0, 2])
def test_an_optimizer_goes_on_and_an_object_that_lives_stays_the_same(stray: int) -> None:
    model, optimizer, step = trained(3)
    shot = take(CFCheckpoint(model=model, optimizer=optimizer))
    step()
    other, restored, step_other = trained(stray)
    live = [state["projector"] for state in restored.state.values()]
    matrices = [one.matrix for one in live]
    restore(CFCheckpoint(model=other, optimizer=restored), shot)
    now = [state["projector"] for state in restored.state.values()]
    assert [a is b for a, b in zip(live, now, strict=False)] == [True] * stray
    assert [a is b.matrix for a, b in zip(matrices, now, strict=False)] == [True] * stray
    assert restored.param_groups[0]["norm"] is Norm.SIGN
    step_other()
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)


Transition = namedtuple("Transition", "state reward")


def test_a_memory_in_a_dict_is_exact_if_the_script_has_its_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory: deque[Transition] = deque([Transition(torch.ones(2), 0.5)], maxlen=9)
    kept: deque[Transition] = deque(maxlen=9)
    with pytest.raises(StateError, match=r"^data\.memory\[0\]: type .*Transition cannot be kept"):
        take(CFCheckpoint(data={"memory": memory}))
    monkeypatch.setattr(sys.modules["__main__"], "Transition", Transition, raising=False)
    live = {"memory": kept, "seen": (seen := {7})}
    restore(CFCheckpoint(data=live), take(CFCheckpoint(data={"memory": memory, "seen": {1, 2}})))
    assert live["memory"] is kept  # whoever holds it sees what was restored
    assert live["seen"] is seen
    assert seen == {1, 2}
    assert type(kept[0]) is Transition
    assert kept[0].state.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "value", [Slotted(), Custom(), Constant(), Mode.FAST | Mode.SAFE, Namespace(a=1)]
)
def test_what_is_more_than_its_attributes_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(StateError, match=r"^held\.a\[0\]: type .* cannot be kept without pickle"):
        take(CFCheckpoint(held=Holder({"a": [value]})))


def test_an_object_in_two_places_is_refused_with_both() -> None:
    one = Average()
    with pytest.raises(StateError, match=r"^held\.b is the same .*Average as held\.a, and would"):
        take(CFCheckpoint(held=Holder({"a": one, "b": one})))
    limits = Limits(0.0, 1.0)  # nobody can change it
    assert through({"a": limits, "b": limits}) == {"a": limits, "b": limits}


def forged(change: Callable[[dict[str, Any]], None]) -> Shot:
    shot = take(CFCheckpoint(held=Holder({"average": Average()})))
    change(shot.found.manifest.objects["held"]["tree"]["average"])
    return shot


def test_a_class_that_is_not_at_hand_is_named_and_nothing_is_imported() -> None:
    def other(node: dict[str, Any]) -> None:
        node["$object"] = "wave.Wave_read"

    with pytest.raises(StateError, match=r"an object of wave\.Wave_read, and no class of that"):
        plan(CFCheckpoint(held=Holder({})), forged(other))
    assert "wave" not in sys.modules


@pytest.mark.parametrize("name", ["Holder", "Norm", "Slotted", "Custom"])
def test_made_up_objects_are_corrupt(name: str) -> None:
    def other(node: dict[str, Any]) -> None:
        node["$object"] = f"{__name__}.{name}"
        node["fields"] = {"load_state_dict": 1}  # would hide a method

    with pytest.raises(CorruptCheckpointError, match=name):
        plan(CFCheckpoint(held=Holder({})), forged(other))


def test_without_the_classes_they_are_plain_data(tmp_path: Path) -> None:
    state = {"norm": Norm.SIGN, "limits": Limits(0.0, 1.0), "step": Step(torch.ones(1), 2)}
    chk = CFCheckpoint(held=Holder(state))
    with CFManager(tmp_path, chk, mode=CFMode.MANUAL, chk_freq=0) as manager:
        manager.step()
        manager.save(wait=True)
    loaded = checkfreq.load(tmp_path)["held"]
    assert loaded["norm"] == "SIGN"
    assert loaded["limits"] == {"low": 0.0, "high": 1.0}
    assert loaded["step"] == {"state": torch.ones(1), "action": 2}
