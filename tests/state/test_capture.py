"""A capture has no side effects, skips nothing, and tells settled from volatile tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from checkfreq.errors import StateError
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint


def classes(chk: CFCheckpoint) -> dict[str, bool]:
    captured = capture(chk)
    return {f"{ref.stem}.{ref.key}": ref.settled for ref in captured.tensors}


def trained(model: nn.Module, kind: Any = torch.optim.SGD, **kwargs: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = kind(
        [p for p in model.parameters() if p.requires_grad], lr=0.1, **kwargs
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def tied_to(other: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 2, bias=False), other)
    model[1].weight = model[0].weight
    return model


def frozen_beside_trained() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.BatchNorm1d(2))
    return {"model": model, "opt": trained(model, momentum=0.9)}


def in_no_optimizer() -> dict[str, Any]:
    model = two_layers()
    return {"model": model, "opt": torch.optim.SGD(model[0].parameters(), lr=0.1)}


def averaged_model() -> dict[str, Any]:
    holder = nn.Module()
    holder.net = nn.Linear(2, 2)
    holder.ema = AveragedModel(holder.net).requires_grad_(False)
    return {"model": holder, "opt": trained(holder.net)}


def max_norm() -> dict[str, Any]:
    model = nn.EmbeddingBag(4, 2, max_norm=1.0)
    return {"model": model, "opt": trained(model, momentum=0.9)}


def alias_of_mixed_classes() -> dict[str, Any]:
    model = tied_to(nn.Embedding(2, 4, max_norm=1.0))
    return {"model": model, "opt": trained(model)}


def in_param_groups() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    lr = torch.tensor(0.1)
    return {"model": model, "opt": torch.optim.Adam(model.parameters(), lr=lr, capturable=False)}


def other_objects() -> dict[str, Any]:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    return {"scaler": scaler, "best": {"x": torch.ones(1)}, "other": Holder(torch.ones(1))}


def declared() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return {
        "model": model,
        "opt": trained(model),
        "ema": nn.Linear(2, 2),
        "settled": ("ema", "model.1.running_mean"),
        "volatile": ("model.1", "ema.bias"),
    }


def declared_by_a_tied_name() -> dict[str, Any]:
    model = tied_to(nn.Linear(4, 2, bias=False))
    return {"model": model, "opt": trained(model), "volatile": ("model.1.weight",)}


NORM = {"running_mean", "running_var", "num_batches_tracked"}
VOLATILE: dict[str, tuple[Callable[[], dict[str, Any]], set[str]]] = {
    "buffers": (frozen_beside_trained, {f"model.1.{name}" for name in NORM}),
    "parameters in no optimizer": (in_no_optimizer, {"model.1.weight", "model.1.bias"}),
    "averages": (
        averaged_model,
        {"model.ema.n_averaged", "model.ema.module.weight", "model.ema.module.bias"},
    ),
    "max_norm": (max_norm, {"model.weight"}),
    "an alias of mixed classes": (alias_of_mixed_classes, {"model.0.weight"}),
    "param groups": (in_param_groups, {"opt.param_groups[0].lr"}),
    "other objects": (
        other_objects,
        {"scaler.scale", "scaler._growth_tracker", "best.x", "other.value"},
    ),
    "declared": (
        declared,
        {"ema.bias", "model.1.weight", "model.1.bias"}
        | {f"model.1.{name}" for name in NORM - {"running_mean"}},
    ),
    "declared by a tied name": (declared_by_a_tied_name, {"model.0.weight"}),
}


@pytest.mark.parametrize(("make", "volatile"), VOLATILE.values(), ids=VOLATILE.keys())
def test_what_more_than_updates_change_is_volatile_and_all_else_settled(
    make: Callable[[], dict[str, Any]], volatile: set[str]
) -> None:
    """In hooked modules too."""
    tracked = make()
    found = classes(CFCheckpoint(rng=False, **tracked))
    assert {name for name, settled in found.items() if not settled} == volatile
    if isinstance(model := tracked.get("model"), nn.Module):
        model.register_state_dict_post_hook(lambda *args: None)
        assert classes(CFCheckpoint(rng=False, **tracked)) == found


def test_a_declared_name_that_matches_nothing_is_an_error() -> None:
    chk = CFCheckpoint(model=nn.Linear(2, 2), volatile=("model.wieght",))
    with pytest.raises(StateError, match=r"'model\.wieght'.*no tensor of the tracked module"):
        classes(chk)


class Holder:
    """The least that can be tracked."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_captured_tensors_are_the_live_storage_even_if_the_parameter_is_bound_anew() -> None:
    model = nn.Linear(2, 2)
    kept = model.weight.detach().clone()
    ref = capture(CFCheckpoint(model=model)).tensors[0]
    assert ref.tensor.data_ptr() == model.weight.data_ptr()
    assert not ref.tensor.requires_grad
    model.weight.data = torch.zeros(2, 2)
    assert torch.equal(ref.tensor, kept)


def test_aliases_share_an_entry_and_overlapping_views_their_memory() -> None:
    base = torch.arange(6.0)
    chk = CFCheckpoint(
        rng=False, d={"a": base, "same": base.view(6), "row": base[:3], "twice": base[:3]}
    )
    captured = capture(chk)
    assert [ref.key for ref in captured.tensors] == ["a:memory"]
    others = dict.fromkeys(("same:memory", "row:memory", "twice:memory"), "a:memory")
    assert captured.aliases == {"d": others}
    assert captured.objects["d"]["composed"].keys() == {"a", "same", "row", "twice"}


def test_equal_paths_get_different_keys() -> None:
    chk = CFCheckpoint(rng=False, d={"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    captured = capture(chk)
    assert [ref.key for ref in captured.tensors] == ["a.b", "a.b#2"]


def test_a_default_device_and_dtype_change_nothing() -> None:
    with torch.device("meta"):
        captured = capture(CFCheckpoint(d={"x": np.ones(2)}))
    assert all(ref.tensor.is_cpu for ref in captured.tensors)


def unknown_parameter(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.state[torch.ones(7)] = {"x": torch.ones(7)}


def odd_leaf(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.param_groups[0]["foo"] = object()


def odd_buffer(tensor: Callable[[], Tensor]) -> Callable[[torch.optim.Optimizer, nn.Module], None]:
    return lambda optimizer, model: model.register_buffer("odd", tensor())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (odd_buffer(lambda: torch.empty(2, device="meta")), r"model\.odd: .*meta device"),
        (odd_buffer(lambda: torch.empty(2, dtype=torch.uint4)), r"model\.odd: .*torch.uint4"),
        (odd_buffer(nn.UninitializedBuffer), r"model\.odd: .*one forward pass"),
        (odd_leaf, r"opt\.param_groups\[0\]\.foo: type object"),
        (unknown_parameter, r"opt\.state holds state of a tensor \[7\]"),
    ],
    ids=["meta", "uint4", "lazy", "leaf", "unknown parameter"],
)
def test_what_is_more_or_less_than_its_bytes_is_refused_by_name(
    spoil: Callable[[torch.optim.Optimizer, nn.Module], None], said: str
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spoil(optimizer, model)
    with pytest.raises(StateError, match=said):
        classes(CFCheckpoint(model=model, opt=optimizer))
