"""Canonical names: wrappers leave no trace, names of the user's modules stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

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


def test_plain_module_has_the_keys_of_its_state_dict() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert keys(model) == list(model.state_dict())


def test_users_submodules_called_module_keep_their_name() -> None:
    assert keys(Odd()) == list(Odd().state_dict())


def test_compiled_wrapper_leaves_no_trace() -> None:
    assert keys(compiled(Odd())) == list(Odd().state_dict())


def test_compiled_submodule_leaves_no_trace() -> None:
    model = nn.Sequential(compiled(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert keys(model) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_data_parallel_leaves_no_trace() -> None:
    assert keys(DataParallel(Odd())) == list(Odd().state_dict())


@pytest.mark.usefixtures("process_group")
def test_distributed_wrapper_around_a_compiled_one_leaves_no_trace() -> None:
    assert keys(DistributedDataParallel(Odd())) == list(Odd().state_dict())
    assert keys(DistributedDataParallel(compiled(Odd()))) == list(Odd().state_dict())
    assert keys(compiled(DistributedDataParallel(Odd()))) == list(Odd().state_dict())


@pytest.mark.usefixtures("process_group")
def test_a_dtensor_on_a_mesh_of_one_is_kept_like_a_plain_tensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    model = distribute_module(nn.Linear(2, 2), init_device_mesh("cpu", (1,)))
    assert keys(model) == ["weight", "bias"]


def test_two_tensors_of_one_name_are_refused() -> None:
    model = DataParallel(nn.Linear(2, 2))
    model.register_buffer("weight", torch.ones(2))
    with pytest.raises(StateError, match="model: two tensors are called 'weight'"):
        keys(model)


def test_averaged_model_keeps_its_module_prefix_but_not_a_wrapper_inside() -> None:
    expected = ["n_averaged", "module.weight", "module.bias"]
    assert keys(AveragedModel(nn.Linear(2, 2))) == expected
    assert keys(AveragedModel(DataParallel(nn.Linear(2, 2)))) == expected


def test_hooked_module_inside_a_wrapper_has_canonical_names_too() -> None:
    model = Odd()
    model.module.register_state_dict_post_hook(lambda *args: None)
    assert keys(compiled(model)) == list(Odd().state_dict())


def test_non_persistent_buffers_come_last() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model.register_buffer("kept", torch.zeros(2))
    assert keys(model) == ["weight", "bias", "kept", "cache"]


def test_a_submodule_replaced_between_captures_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    chk = CFCheckpoint(rng=False, model=model)
    capture(chk)
    model[0] = nn.Sequential(nn.Linear(2, 2, bias=False))
    model.append(nn.PReLU())
    found = capture(chk).tensors
    assert [ref.key for ref in found] == ["0.0.weight", "1.weight"]


def test_a_parameter_replaced_between_captures_is_noticed() -> None:
    model = nn.Linear(2, 2)
    chk = CFCheckpoint(rng=False, model=model)
    capture(chk)
    model.weight = nn.Parameter(torch.ones(5, 5))
    assert capture(chk).tensors[0].tensor.shape == (5, 5)
