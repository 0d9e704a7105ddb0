"""Graphs are captured while snapshots are under way: neither breaks the other.

Kernels are launched once before they are captured, so that each test runs alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from checkfreq.config import CFConfig
from checkfreq.errors import StateError
from checkfreq.snapshot.arena import Arena
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.pinning import DevicePinner
from checkfreq.types import SnapshotPlace
from tests.gpu.bench import DEADLINE_S, LARGE, SHORT, Bench, LateDevice, warm_up

#: Warnings of CUDA libraries and of PyTorch's own debug modes are not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

#: Above what the arena prepares in the calling thread.
LARGE_BYTES = 256 << 20


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(device=LateDevice(copy=10 * SHORT, pack=10 * SHORT))
    yield bench
    bench.close()


@contextmanager
def captured() -> Iterator[None]:
    """Capture a graph in the strictest mode, and replay it."""
    source, result = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    result.copy_(source * 2)
    result.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="global")
        result.copy_(source * 2)
        try:
            yield
        finally:
            graph.capture_end()
        graph.replay()
    stream.synchronize()
    assert result.tolist() == [2.0] * 8


def weights() -> dict[str, tuple[torch.Tensor, bool]]:
    return {f"w{n}": (torch.ones(LARGE, device="cuda"), True) for n in range(4)}


def test_a_graph_can_be_captured_while_a_snapshot_is_copied(bench: Bench) -> None:
    """The helper thread waits for events meanwhile, which a capture forbids to other threads."""
    for place in (SnapshotPlace.HOST, SnapshotPlace.DEVICE):
        bench.take(weights(), place)
    with captured():
        assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
    bench.finish()


def test_a_fence_in_a_capture_is_left_out(bench: Bench) -> None:
    bench.take(weights())
    bench.engine.fence(timeout_s=0.0)
    with captured():
        assert bench.engine.fence(timeout_s=0.0) == 0.0
        assert bench.engine.device_wait_s == 0.0
    bench.finish()


def test_a_boundary_in_a_capture_is_refused(bench: Bench) -> None:
    state = weights()
    with captured():
        bench.take(state)
    (error,) = bench.errors
    assert isinstance(error, StateError)


def test_memory_is_pinned_and_unpinned_while_a_graph_is_captured() -> None:
    warm_up()
    arena = Arena(config=CFConfig(num_slots=1), pinner=DevicePinner(CudaDevice()))
    with captured():
        arena.allocate(LARGE_BYTES)
        assert arena.wait_ready(timeout_s=DEADLINE_S)
        (slot,) = arena.slots
        assert slot.pins is not None, "it was not pinned in the capture"
        arena.close()
