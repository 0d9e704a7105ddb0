"""Canonical names: wrappers leave no trace, names of the user's modules stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from checkfreq.errors import StateError
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint


def keys(module: nn.Module) -> list[str]:
    chk = CFCheckpoint(rng=False, model=module)
    return [ref.key for ref in capture(chk).tensors]


def compiled(module: nn.Module) -> nn.Module:
    wrapper = torch.compile(module, backend="eager")  # the default one warns at import
    assert isinstance(wrapper, nn.Module)
    return wrapper


class Odd(nn.Module):
    """Has submodules of its own called like the wrappers' children."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._orig_mod(self.module(x))
        return out


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def hooked_inside() -> nn.Module:
    model = Odd()
    model.module.register_state_dict_post_hook(lambda *args: None)
    return compiled(model)


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "plain": Odd,
    "compiled": lambda: compiled(Odd()),
    "hooked inside": hooked_inside,
    "data parallel": lambda: DataParallel(Odd()),
    "distributed": lambda: DistributedDataParallel(Odd()),
    "distributed around compiled": lambda: DistributedDataParallel(compiled(Odd())),
    "compiled around distributed": lambda: compiled(DistributedDataParallel(Odd())),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED.keys())
def test_wrappers_leave_no_trace_and_users_submodules_of_such_names_keep_theirs(
    make: Callable[[], nn.Module],
) -> None:
    assert keys(make()) == list(Odd().state_dict())


def test_two_tensors_of_one_name_are_refused() -> None:
    model = DataParallel(nn.Linear(2, 2))
    model.register_buffer("weight", torch.ones(2))
    with pytest.raises(StateError, match="model: two tensors are called 'weight'"):
        keys(model)


def test_a_submodule_or_parameter_replaced_between_captures_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    chk = CFCheckpoint(rng=False, model=model)
    capture(chk)
    model[0] = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.append(nn.PReLU())
    assert [ref.key for ref in capture(chk).tensors] == ["0.0.weight", "1.weight"]
    model[1].weight = nn.Parameter(torch.ones(5))
    assert capture(chk).tensors[1].tensor.shape == (5,)
