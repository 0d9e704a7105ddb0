"""A few elements tell whether a tensor changed while it was copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from checkfreq.snapshot.arena import Slot
from checkfreq.snapshot.engine import Copy, copy_to_slot
from checkfreq.snapshot.watch import (
    HostWatch,
    Watch,
)

TENSORS = {
    "scalar": torch.tensor(3.0),
    "large": torch.arange(1000.0).reshape(10, 100),
    "bfloat16": torch.randn(700).bfloat16(),
    "transposed": torch.arange(600.0).reshape(20, 30).t(),
    "column": torch.arange(600.0).reshape(20, 30)[:, 3],
    "channels_last": torch.arange(240.0).reshape(2, 5, 4, 6).to(memory_format=torch.channels_last),
    "expanded": torch.tensor([2.0]).expand(7),
}


def copy_of(tensor: torch.Tensor, offset: int = 64) -> Copy:
    return Copy("t", tensor, offset, tensor.numel() * tensor.element_size(), True, True)


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_the_same_elements_are_read_in_storage_in_the_slot_and_through_a_view(
    tensor: torch.Tensor, slot: Slot
) -> None:
    copy = copy_of(tensor)
    copy_to_slot(copy, slot)
    watch = Watch.of(copy)
    assert watch.num_bytes == len(watch.read_host()) > 0
    assert watch.read_slot(slot) == watch.read_host()
    flat = watch.view().contiguous().reshape(-1).view(torch.uint8)
    assert flat.numpy().tobytes() == watch.read_host()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda tensor: tensor.add_(1),
    "through data": lambda tensor: tensor.data.add_(1),
    "where it is not read": lambda tensor: tensor[100].zero_(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_seen(change: Callable[[torch.Tensor], object], slot: Slot) -> None:
    copy = copy_of(tensor := torch.ones(1 << 13))
    copy_to_slot(copy, slot)
    watch = HostWatch([copy])
    assert watch.changed(slot) == []
    change(tensor)
    assert watch.changed(slot) == ["t"]


def test_a_change_that_is_undone_before_the_second_reading_shows_in_the_slot(slot: Slot) -> None:
    tensor = torch.ones(100)
    watch = HostWatch([copy_of(tensor)])
    tensor.data.add_(1)
    copy_to_slot(copy_of(tensor), slot)
    tensor.data.sub_(1)
    assert watch.changed(slot) == ["t"]


def test_tensors_of_inference_mode_have_no_version_and_are_watched_by_content(slot: Slot) -> None:
    with torch.inference_mode():
        tensor = torch.ones(100)
        copy_to_slot(copy_of(tensor), slot)
        watch = HostWatch([copy_of(tensor)])
        assert watch.changed(slot) == []
        tensor.add_(1)
        assert watch.changed(slot) == ["t"]
