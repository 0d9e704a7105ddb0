"""State that lies in an odd way comes back as it lay, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from checkfreq.errors import StateError
from checkfreq.formats import to_safetensors
from tests.silence.training import EVERY

# ---- optimizer state that shares memory shares it again after a restore, or is refused by name


State = dict[str, Any]


def optimizer_of(make: Callable[[Tensor], State] | None, fill: float = 0.0) -> torch.optim.SGD:
    weight = nn.Parameter(torch.full((6, 4), fill))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if make is not None:
        optimizer.state[weight] = make(weight.data)
    return optimizer


def state_of(optimizer: torch.optim.Optimizer) -> State:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


def saved_and_restored(folder: Path, saved: Any, live: Any) -> Any:
    with CFManager(folder, CFCheckpoint(opt=saved, rng=False), **EVERY) as manager:
        manager.save(wait=True)
    with CFManager(folder, CFCheckpoint(opt=live, rng=False), **EVERY) as manager:
        assert manager.restore()
    return live


def tensors_of(state: State) -> list[Tensor]:
    found = []
    for value in state.values():
        found += value if isinstance(value, list) else [value]
    return found


def assert_shared_alike(*states: State) -> None:
    """Same values and strides, and a write to a tensor shows in the same others of each state."""
    rows = list(zip(*map(tensors_of, states), strict=True))
    for tensors in rows:
        assert len({tensor.stride() for tensor in tensors}) == 1
    for number, written in enumerate(rows, 1):
        for tensor in written:
            tensor[(0,) * tensor.dim()].fill_(number)
        for first, *others in rows:
            assert all(torch.equal(first, other) for other in others)


def halves(weight: Tensor) -> State:
    both = torch.randn(2, 6, 4)
    return {"both": both, "first": both[0], "second": both[1].t()}


def overlapping(weight: Tensor) -> State:
    line = torch.randn(10)
    return {"windows": line.unfold(0, 4, 2), "ends": [line[:6], line[3:]]}


def of_the_parameter(weight: Tensor) -> State:
    return {"same": weight, "turned": weight.t(), "rows": weight[2:4], "first": weight[:2]}


@pytest.mark.parametrize("make", [halves, overlapping])
def test_memory_that_is_shared_is_shared_again(make: Any, tmp_path: Path) -> None:
    saved = optimizer_of(make)
    live = saved_and_restored(tmp_path, saved, optimizer_of(None))
    loaded = checkfreq.load(tmp_path)["opt"]["state"][0]
    assert_shared_alike(state_of(saved), state_of(live), loaded)


def test_live_state_stays_where_it_is_if_it_shares_alike_and_is_made_anew_if_not(
    tmp_path: Path,
) -> None:
    def apart(weight: Tensor) -> State:
        return {name: tensor.clone() for name, tensor in halves(weight).items()}

    for make in (halves, apart):
        saved, live = optimizer_of(halves), optimizer_of(make)
        before = dict(state_of(live))
        saved_and_restored(tmp_path / make.__name__, saved, live)
        if make is halves:
            assert all(tensor is before[name] for name, tensor in state_of(live).items())
        assert_shared_alike(state_of(saved), state_of(live))


def test_a_view_of_the_parameter_is_one_again(tmp_path: Path) -> None:
    saved = optimizer_of(of_the_parameter, 1.0)
    live = saved_and_restored(tmp_path, saved, optimizer_of(None, 1.0))
    weight = live.param_groups[0]["params"][0]
    with torch.no_grad():
        weight.copy_(torch.arange(24.0).view(6, 4))
    assert torch.equal(state_of(live)["same"], weight)
    assert torch.equal(state_of(live)["turned"], weight.t())
    assert torch.equal(state_of(live)["rows"], weight[2:4])
    assert torch.equal(state_of(live)["first"], weight[:2])


def test_what_cannot_be_shared_again_or_is_loaded_in_another_way_is_refused_by_name(
    tmp_path: Path,
) -> None:
    as_bits = optimizer_of(lambda weight: {"bits": weight.view(torch.int32)})
    hooked = optimizer_of(halves)
    hooked.register_load_state_dict_pre_hook(lambda optimizer, state: None)
    for optimizer, said in (
        (as_bits, r"opt\.state\.0\.\w+ and .* share memory"),
        (hooked, r"opt: state\.0\.\w+ shares memory"),
    ):
        checkpoint = CFCheckpoint(opt=optimizer, rng=False)
        with (
            CFManager(tmp_path, checkpoint, **EVERY) as manager,
            pytest.raises(StateError, match=said),
        ):
            manager.save(wait=True)


# ---- optimizer state, and other tensors that a restore makes anew, have the strides they had


def odd_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    return {
        "column_major": torch.randn(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "with gaps": torch.randn(6, 4)[::2, 1:3],
        "plain": torch.randn(2, 2),
    }


def assert_alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, tensor in one.items():
        assert other[name].stride() == tensor.stride(), name
        assert torch.equal(other[name], tensor), name


def test_state_that_is_made_anew_or_lies_differently_gets_the_saved_strides(tmp_path: Path) -> None:
    def contiguous(_: Tensor) -> State:
        return {name: tensor.contiguous() for name, tensor in odd_tensors().items()}

    for number, make in enumerate((None, contiguous)):
        live = optimizer_of(make)
        saved_and_restored(tmp_path / str(number), optimizer_of(lambda _: odd_tensors()), live)
        assert_alike(odd_tensors(), next(iter(live.state.values())))


def test_state_of_the_saved_strides_stays_where_it_is(tmp_path: Path) -> None:
    there = {name: torch.zeros_like(tensor) for name, tensor in odd_tensors().items()}
    there["with gaps"] = torch.zeros(6, 4)[::2, 1:3]
    there["expanded"] = torch.zeros(3, 1).expand(3, 4)
    live = optimizer_of(lambda _: dict(there))
    saved_and_restored(tmp_path, optimizer_of(lambda _: odd_tensors()), live)
    assert all(tensor is there[name] for name, tensor in next(iter(live.state.values())).items())
    assert_alike(odd_tensors(), there)


def test_a_dict_an_object_and_a_plain_load_get_them_too(tmp_path: Path) -> None:
    class Holder:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    saved, holder = Holder(), Holder()
    saved.state = {**odd_tensors(), "array": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2)}
    saved_and_restored(tmp_path / "object", saved, holder)
    assert_alike(odd_tensors(), holder.state)
    assert holder.state["array"].strides == saved.state["array"].strides
    live: dict[str, Any] = {"column_major": torch.zeros(4, 3)}
    saved_and_restored(tmp_path / "dict", odd_tensors(), live)
    assert_alike(odd_tensors(), live)
    assert_alike(odd_tensors(), checkfreq.load(tmp_path / "dict")["opt"])


# ---- buffers with ``persistent=False`` that training changes are saved, beside the state dict


class Counting(nn.Linear):
    seen: torch.Tensor

    def __init__(self, size: int = 1) -> None:
        super().__init__(8, 3)
        self.register_buffer("seen", torch.zeros(size), persistent=False)
        self.register_buffer("tied", self.weight.detach(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x) / (1 + self.seen.log1p())


class CountingItsOwnWay(Counting):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize("kind", [Counting, CountingItsOwnWay])
def test_they_are_restored_and_in_no_state_dict_that_others_read(
    kind: type[Counting], tmp_path: Path
) -> None:
    model, again = kind(), kind()
    model(torch.ones(1, 8))
    for live in (model, again):
        with CFManager(tmp_path / "run", CFCheckpoint(model=live), **EVERY) as manager:
            if not manager.restore():
                manager.save(wait=True)
    assert torch.equal(again.seen, torch.ones(1))
    step = tmp_path / "run" / "step-00000000"
    assert (step / "model.buffers.safetensors").exists()
    to_safetensors(tmp_path / "run", tmp_path / "exported.safetensors")
    for state in (
        safetensors.torch.load_file(step / "model.safetensors"),
        safetensors.torch.load_file(tmp_path / "exported.safetensors"),
        checkfreq.load(tmp_path / "run")["model"],
    ):
        assert state.keys() == {"weight", "bias"}
        model.load_state_dict(state, strict=True)


def test_one_that_does_not_fit_or_is_not_there_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CFManager(tmp_path, CFCheckpoint(model=Counting(size=3)), **EVERY) as manager:
        manager.save(wait=True)
    smaller, none, removed = Counting(size=2), Counting(), nn.Linear(8, 3)
    none.register_buffer("seen", None, persistent=False)
    for live, found in ((smaller, "float32[2]"), (none, "None"), (removed, "")):
        caplog.clear()
        with CFManager(tmp_path, CFCheckpoint(model=live), **EVERY) as manager:
            assert manager.restore()
        warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        said = f"model.seen, a buffer with persistent=False: live is {found}, where the checkpoint"
        assert len(warnings) == bool(found)
        assert said in "".join(warnings) or not found
    larger = nn.Linear(8, 3)
    larger.register_buffer("new", torch.ones(2), persistent=False)
    larger.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
    with CFManager(tmp_path, CFCheckpoint(model=larger), **EVERY) as manager:
        assert manager.restore()
        manager.save(wait=True)
    assert torch.equal(larger.get_buffer("new"), torch.ones(2))
