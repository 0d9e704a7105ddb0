"""File images: valid safetensors, aligned, without gaps, reused while the structure is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq.snapshot.layout import StateLayout
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState, TensorRef
from checkfreq.state.tensors import DTYPE_NAMES
from checkfreq.types import PAGE_BYTES
from tests.state.support import take


def test_tensors_that_are_copied_together_are_adjacent() -> None:
    """Of one element size: volatile ones, then settled ones; each of one device, then by size."""
    forms = [
        ("host", 9, True, "cpu"),
        ("large", 9, True, "meta"),
        ("small", 2, True, "meta"),
        ("mean", 5, False, "meta"),
        ("step", 1, True, "cpu"),
        ("middle", 4, True, "meta"),
    ]
    refs = [TensorRef("o", n, torch.empty(c, device=d), s) for n, c, s, d in forms]
    (file,) = StateLayout.plan(CapturedState(refs, {}, {})).files
    placed = sorted(file.tensors, key=lambda tensor: tensor.offset)
    names = ["mean", "step", "host", "small", "middle", "large"]
    assert [tensor.name for tensor in placed] == names


def test_files_list_their_tensors_in_the_order_of_the_state() -> None:
    """Also where they lie in another order: a state dict that is read from one keeps its order."""
    model = nn.Module()
    for name, dtype in (("flag", torch.bool), ("weight", torch.float32), ("count", torch.int64)):
        model.register_buffer(name, torch.zeros(3, dtype=dtype))
    (file,) = take(CFCheckpoint(rng=False, model=model)).layout.files
    assert [tensor.name for tensor in file.tensors] == ["flag", "weight", "count"]
    placed = sorted(file.tensors, key=lambda tensor: tensor.offset)
    assert [tensor.name for tensor in placed] == ["count", "weight", "flag"]


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_no_element_of_any_dtype_lies_across_pages() -> None:
    """Copies from a device are cut at pages."""
    buffers = {f"b{n}": torch.empty(3, dtype=dtype) for n, dtype in enumerate(DTYPE_NAMES)}
    layout = take(CFCheckpoint(rng=False, first={"odd": torch.zeros(5)}, state=buffers)).layout
    _, file = layout.files
    assert {tensor.dtype for tensor in file.tensors} == {*DTYPE_NAMES.values()}
    for tensor in file.tensors:
        size = tensor.num_bytes // 3
        assert (file.slot_offset + tensor.offset) % size == 0
        assert PAGE_BYTES % size == 0


def test_headers_of_as_many_pages_as_it_takes_and_images_lie_apart_in_whole_pages() -> None:
    model = nn.ModuleList([nn.Linear(1, 1) for _ in range(100)])
    layout = take(CFCheckpoint(model=model)).layout
    assert [file.name for file in layout.files] == ["model.safetensors", "rng.safetensors"]
    assert layout.files[0].header_bytes == 4 * PAGE_BYTES
    end = 0
    for file in layout.files:
        assert file.slot_offset >= end
        assert file.slot_offset % PAGE_BYTES == file.header_bytes % PAGE_BYTES == 0
        end = file.slot_offset + file.num_bytes
    assert layout.total_bytes % PAGE_BYTES == 0
    assert end <= layout.total_bytes < end + PAGE_BYTES


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "new buffer": lambda model: model.register_buffer("more", torch.zeros(1)),
    "dtype": lambda model: model.double(),
    "shape": lambda model: setattr(model, "weight", nn.Parameter(torch.zeros(4, 4))),
    "tied": lambda model: setattr(model, "bias", model.weight),
    "declared volatile": lambda model: {"volatile": ("model",)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_layout_fits_later_captures_but_not_a_changed_structure(
    change: Callable[[nn.Module], Any],
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout = StateLayout.plan(capture(CFCheckpoint(model=model, optimizer=optimizer)))
    with torch.no_grad():
        model.weight.add_(1)
    assert layout.fits(capture(CFCheckpoint(model=model, optimizer=optimizer)))
    found = change(model)
    options = found if isinstance(found, dict) else {}
    assert not layout.fits(capture(CFCheckpoint(model=model, optimizer=optimizer, **options)))
