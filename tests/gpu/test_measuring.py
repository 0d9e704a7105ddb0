"""Measurements on a real device: iterations and memory."""

from __future__ import annotations

import time

import pytest
import torch

from checkfreq.pacing.timing import DeviceTimer, Span
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device_memory import Nvml, free_device_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]


def test_iterations_queued_ahead_are_reported_once_each_after_they_ran() -> None:
    weight = torch.zeros(1 << 20, device="cuda")
    timer = DeviceTimer(CudaDevice(), weight.device)
    spans: list[Span] = []
    torch.cuda.synchronize()
    before_s = time.perf_counter()
    timer.mark_boundary()
    for _ in range(50):
        weight.add_(1)
        timer.mark_update()
        weight.mul_(2)
        timer.mark_boundary()
        spans += timer.finished()
    torch.cuda.synchronize()
    spans += timer.finished()
    after_s = time.perf_counter()

    assert len(spans) == 50
    for span in spans:
        assert span.update_s is not None
        assert before_s <= span.start_s <= span.update_s <= span.end_s <= after_s


def test_a_graph_is_captured_across_a_boundary() -> None:
    weight = torch.zeros(16, device="cuda")
    timer = DeviceTimer(CudaDevice(), weight.device)
    graph = torch.cuda.CUDAGraph()
    timer.mark_boundary()
    with torch.cuda.graph(graph):
        weight.add_(1)
        timer.mark_boundary()
        assert timer.finished() == []
    graph.replay()
    timer.mark_boundary()
    torch.cuda.synchronize()

    assert len(timer.finished()) == 2
    assert weight.sum().item() == 16


def test_free_memory_shrinks_by_what_is_allocated() -> None:
    device = torch.empty(1, device="cuda").device
    before = free_device_bytes(device)
    block = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    after = free_device_bytes(device)

    assert before is not None
    assert after is not None
    assert 0 < after <= torch.cuda.get_device_properties(device).total_memory
    assert before - after >= block.numel() // 2  # others may free some meanwhile


def test_nvml_finds_the_device() -> None:
    pytest.importorskip("pynvml")
    device = torch.empty(1, device="cuda").device
    assert Nvml().free_bytes(torch.cuda.get_device_properties(device)) is not None
