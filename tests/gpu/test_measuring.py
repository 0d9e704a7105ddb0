"""Measurements on a real device: iterations and memory."""

from __future__ import annotations

import time

import pytest
import torch

from checkfreq.pacing.timing import DeviceTimer, Span
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.nvml import Nvml

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


def test_free_memory_shrinks_by_what_is_reserved_and_the_allocator_knows_it() -> None:
    device = torch.empty(1, device="cuda").device
    cuda = CudaDevice()
    torch.cuda.empty_cache()
    before, use_before = cuda.free_bytes(device), cuda.memory_use(device)
    block = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    after, use_after = cuda.free_bytes(device), cuda.memory_use(device)

    assert before is not None
    assert after is not None
    assert 0 < after <= torch.cuda.get_device_properties(device).total_memory
    assert before - after >= block.numel() // 2  # others may free some meanwhile
    assert use_after.reserved_bytes - use_before.reserved_bytes == cuda.segment_bytes(block.numel())
    assert use_after.peak_bytes >= use_after.reserved_bytes
    assert use_after.num_shortages == use_before.num_shortages


def test_a_limit_of_the_process_and_running_into_it_are_seen() -> None:
    device = torch.empty(1, device="cuda").device
    cuda, total = CudaDevice(), torch.cuda.get_device_properties(device).total_memory
    before = cuda.memory_use(device)
    torch.cuda.set_per_process_memory_fraction(0.25, device)
    try:
        assert cuda.memory_use(device).limit_bytes == total // 4
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(total // 3, dtype=torch.uint8, device=device)
        assert cuda.memory_use(device).num_shortages > before.num_shortages
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_nvml_finds_the_device() -> None:
    pytest.importorskip("pynvml")
    device = torch.empty(1, device="cuda").device
    assert Nvml().free_bytes(torch.cuda.get_device_properties(device)) is not None


def test_the_side_stream_is_none_of_the_pool_and_waits_for_no_default_stream() -> None:
    device = torch.empty(1, device="cuda").device
    cuda = CudaDevice()
    side = cuda.side_stream(device)
    pool = {torch.cuda.Stream(device).cuda_stream for _ in range(64)}
    assert side.cuda_stream not in pool
    assert side != torch.cuda.current_stream(device)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # on the default stream, for about a second
    ours = cuda.record(side)
    cuda.synchronize(ours)
    behind = torch.cuda.Event()
    behind.record()
    assert not behind.query(), "our stream waited for the default stream"
    torch.cuda.synchronize()
    cuda.return_stream(side)
    assert cuda.side_stream(device) is side


def test_a_tensor_kept_for_our_stream_may_outlive_the_engine() -> None:
    device = torch.empty(1, device="cuda").device
    cuda = CudaDevice()
    side, tensor = cuda.side_stream(device), torch.ones(1 << 20, device=device)
    cuda.keep([tensor], stream=side)
    cuda.return_stream(side)
    del tensor  # the allocator records an event on the stream
    torch.ones(1 << 20, device=device).add_(1)
    torch.cuda.synchronize()


@pytest.mark.parametrize("view", ["conj", "neg", "strided"])
def test_any_view_is_copied_to_the_host_without_a_buffer_of_ours(view: str) -> None:
    device, cuda = torch.device("cuda", 0), CudaDevice()
    source = torch.randn(64, 32, dtype=torch.complex64, device=device)
    viewed = {"conj": source.conj(), "neg": torch._neg_view(source), "strided": source.t()}[view]
    target = torch.empty(viewed.shape, dtype=viewed.dtype, pin_memory=True)
    side = cuda.side_stream(device)
    cuda.wait(side, cuda.record(cuda.current_stream(device)))
    cuda.copy([(target, viewed)], stream=side)
    cuda.synchronize(cuda.record(side))
    assert torch.equal(target, viewed.cpu())
