"""The device engine on a real device: the same ordering, with real streams under load.

Nothing here measures time. That the host does not wait is shown by an event behind a long
sleep on the device: had anything waited for the device, the event would have happened.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from checkfreq.config import CFConfig
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device_copier import Limits
from checkfreq.snapshot.device_engine import DeviceEngine, DevicePinner
from checkfreq.snapshot.engine import Copy, view_in_slot
from checkfreq.types import SnapshotPlace

#: Warnings of CUDA libraries and of PyTorch's own debug modes are not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]
PLACES = pytest.mark.parametrize("place", list(SnapshotPlace))

LONG = 4_000_000_000  # cycles: about two seconds
SHORT = 20_000_000
LARGE = (4 << 20) // 4  # elements of a float32 tensor above every small limit
DEADLINE_S = 120.0


class Bench:
    """An engine, an arena of two slots, and the copies of some named tensors."""

    def __init__(self, *, limits: Limits | None = None, slot_bytes: int = 80 << 20) -> None:
        self.engine = DeviceEngine(CudaDevice(), limits=limits)
        config = CFConfig(host_memory_limit=1 << 32)
        self.arena = Arena(config=config, pinner=DevicePinner(CudaDevice()))
        torch.zeros(1, device="cuda")
        self.arena.allocate(slot_bytes)
        assert self.arena.wait_ready(timeout_s=DEADLINE_S)
        self.errors: list[BaseException | None] = []
        self._looked_at: set[torch.device] = set()

    def look_at(self, devices: set[torch.device]) -> None:
        """Find out what is free on devices that are new, as a new layout does."""
        if new := devices - self._looked_at:
            self._looked_at |= new
            done = threading.Event()
            self.engine.look_at(new)
            self.engine._helper.submit(done.set)
            assert done.wait(DEADLINE_S)

    def take(self, tensors: dict[str, tuple[Tensor, bool]], place: SnapshotPlace) -> Taken:
        slot = self.arena.acquire()
        assert slot is not None
        copies, offset = [], 4096
        for name, (tensor, settled) in sorted(
            tensors.items(), key=lambda item: -item[1][0].element_size()
        ):
            num_bytes = tensor.numel() * tensor.element_size()
            copies.append(Copy(name, tensor.detach(), offset, num_bytes, settled))
            offset += num_bytes
        taken = Taken(copies, slot)
        self.look_at({tensor.device for tensor, _ in tensors.values() if tensor.is_cuda})
        self.engine.place = place
        self.engine.start(copies, slot, on_copied=self.errors.append)
        return taken

    def finish(self) -> None:
        assert self.engine.wait_copied(timeout_s=DEADLINE_S)
        self.engine.close()
        assert all(error is None for error in self.errors), self.errors

    def close(self) -> None:
        self.engine.close()
        self.arena.close()


class Taken:
    """A snapshot; its tensors are read from the slot."""

    def __init__(self, copies: list[Copy], slot: Slot) -> None:
        self.slot = slot
        self._forms = [(c.name, c.source.dtype, c.source.shape, c.offset) for c in copies]

    def __getitem__(self, name: str) -> Tensor:
        for known, dtype, shape, offset in self._forms:
            if known == name:
                like = torch.empty(shape, dtype=dtype)
                if not like.numel():
                    return like
                copy = Copy(name, like, offset, like.numel() * like.element_size(), False)
                return view_in_slot(copy, self.slot).clone()
        raise KeyError(name)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def same_bits(one: Tensor, other: Tensor) -> bool:
    plain = [t.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (one, other)]
    return torch.equal(plain[0].view(torch.uint8), plain[1].view(torch.uint8))


@contextmanager
def host_must_not_wait() -> Iterator[None]:
    """Fails if the block waits for the device; PyTorch's own check is on as well."""
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    behind = torch.cuda.Event()
    behind.record()
    torch.cuda.set_sync_debug_mode("error")  # warns that it does not find everything
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not behind.query(), "the host waited for the device"


@PLACES
def test_volatile_state_is_that_of_the_boundary_under_load(
    bench: Bench, place: SnapshotPlace
) -> None:
    small, large = torch.zeros(100, device="cuda"), torch.zeros(LARGE, device="cuda")
    torch.cuda._sleep(SHORT)  # the boundary's own work is still queued
    small.fill_(1)
    large.fill_(1)
    taken = bench.take({"small": (small, False), "large": (large, False)}, place)
    small.fill_(2)
    large.fill_(2)
    bench.finish()
    assert bool((taken["small"] == 1).all())
    assert bool((taken["large"] == 1).all())


@PLACES
def test_an_update_behind_the_fence_comes_after_the_copy(
    bench: Bench, place: SnapshotPlace
) -> None:
    weights = [torch.zeros(LARGE, device="cuda") for _ in range(16)]
    torch.cuda._sleep(SHORT)
    for weight in weights:
        weight.fill_(1)
    taken = bench.take({f"w{n}": (w, True) for n, w in enumerate(weights)}, place)
    assert bench.engine.fence(timeout_s=0.0) == 0.0
    for weight in weights:
        weight.fill_(2)
    bench.finish()
    assert all(bool((taken[f"w{n}"] == 1).all()) for n in range(16))
    assert all(bool((weight == 2).all()) for weight in weights)
    assert bench.engine.device_wait_s >= 0.0


@PLACES
def test_neither_start_nor_fence_waits_for_the_device(bench: Bench, place: SnapshotPlace) -> None:
    tensors = {
        "large": (torch.ones(LARGE, device="cuda"), True),
        "small": (torch.ones(10, device="cuda"), True),
        "mean": (torch.ones(10, device="cuda"), False),
        "table": (torch.ones(LARGE, device="cuda"), False),
        "turned": (torch.ones(1024, 512, device="cuda").t(), True),
        "step": (torch.tensor(1.0), False),
    }
    bench.engine.place = place
    bench.take(tensors, place)  # buffers are allocated once
    assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
    with host_must_not_wait():
        bench.take(tensors, place)
        bench.engine.fence(timeout_s=0.0)
    bench.finish()


@PLACES
def test_a_users_stream_is_followed(bench: Bench, place: SnapshotPlace) -> None:
    weight, mean = torch.zeros(LARGE, device="cuda"), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SHORT)
        weight.fill_(1)
        mean.fill_(1)
        taken = bench.take({"weight": (weight, True), "mean": (mean, False)}, place)
        mean.fill_(2)
        bench.engine.fence(timeout_s=0.0)
        weight.fill_(2)
    bench.finish()
    assert bool((taken["weight"] == 1).all())
    assert bool((taken["mean"] == 1).all())


@PLACES
@pytest.mark.parametrize("transpose_bytes", [1 << 12, 32 << 20])
def test_strides_dtypes_and_odd_bits_arrive_row_major(
    place: SnapshotPlace, transpose_bytes: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, (3, 1001), device="cuda", generator=generator)
    half = bits.to(torch.int16)
    image = torch.randn(64, 32, 9, 9, device="cuda", generator=generator)
    tensors = {
        "bfloat16": half.view(torch.bfloat16),  # NaNs of every kind
        "float16": half.view(torch.float16),
        "float8": half.view(torch.uint8).view(torch.float8_e4m3fn),
        "turned_bfloat16": half.view(torch.bfloat16).t(),
        "nan": bits.to(torch.int32).view(torch.float32),
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "one_by_one": torch.randn(64, 32, 1, 1, device="cuda").contiguous(
            memory_format=torch.channels_last
        ),
        "expanded": torch.randn(1, 400, device="cuda").expand(300, 400),
        "complex": torch.randn(500, 500, device="cuda", dtype=torch.complex64),
        "conj": torch.randn(500, 500, device="cuda", dtype=torch.complex64).conj(),
        "complex128": torch.randn(5, device="cuda", dtype=torch.complex128),
        "bool": torch.randn(70_001, device="cuda") > 0,
        "uint16": half.view(torch.uint16),
        "scalar": torch.tensor(3.5, device="cuda"),
        "empty": torch.zeros(0, 3, device="cuda"),
    }
    bench = Bench(limits=Limits(transpose_bytes=transpose_bytes))
    taken = bench.take({n: (t, len(n) % 2 == 0) for n, t in tensors.items()}, place)
    bench.finish()
    for name, tensor in tensors.items():
        assert same_bits(taken[name], tensor), name
    bench.close()


@PLACES
def test_memory_of_dropped_sources_is_not_reused_before_the_copy(
    bench: Bench, place: SnapshotPlace
) -> None:
    weights = [torch.ones(LARGE, device="cuda") for _ in range(8)]
    side_load = torch.cuda.Stream()
    with torch.cuda.stream(side_load):
        torch.cuda._sleep(SHORT)
    taken = bench.take({f"w{n}": (w, True) for n, w in enumerate(weights)}, place)
    weights.clear()
    for _ in range(50):
        torch.full((LARGE,), 7.0, device="cuda")
    bench.finish()
    assert all(bool((taken[f"w{n}"] == 1).all()) for n in range(8))


@PLACES
def test_storage_resized_away_is_not_reused_before_the_copy(
    bench: Bench, place: SnapshotPlace
) -> None:
    weights = [torch.ones(LARGE, device="cuda") for _ in range(8)]
    taken = bench.take({f"w{n}": (w, True) for n, w in enumerate(weights)}, place)
    for weight in weights:
        weight.untyped_storage().resize_(0)
    for _ in range(50):
        torch.full((LARGE,), 7.0, device="cuda")
    bench.finish()
    assert all(bool((taken[f"w{n}"] == 1).all()) for n in range(8))


@PLACES
def test_many_snapshots_in_a_row_hold_their_own_boundaries(
    bench: Bench, place: SnapshotPlace
) -> None:
    weight, mean = torch.zeros(LARGE, device="cuda"), torch.zeros(100, device="cuda")
    pending: list[tuple[Taken, int]] = []
    for step in range(20):
        torch.cuda._sleep(SHORT // 20)
        mean.fill_(step)
        bench.engine.fence(timeout_s=0.0)
        weight.fill_(step)
        if len(pending) == 2:
            check_and_release(bench, pending)
        pending.append((bench.take({"w": (weight, True), "m": (mean, False)}, place), step))
    check_and_release(bench, pending)
    bench.finish()


def check_and_release(bench: Bench, pending: list[tuple[Taken, int]]) -> None:
    assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
    for taken, step in pending:
        assert bool((taken["w"] == step).all())
        assert bool((taken["m"] == step).all())
        bench.arena.release(taken.slot)
    pending.clear()


def test_a_graph_can_be_captured_while_a_snapshot_is_copied(bench: Bench) -> None:
    """The helper thread waits for events meanwhile, which a capture forbids to other threads."""
    source, result = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    weights = {f"w{n}": (torch.ones(LARGE, device="cuda"), True) for n in range(4)}
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(SHORT * 10)
    bench.take(weights, SnapshotPlace.HOST)
    bench.take(weights, SnapshotPlace.DEVICE)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="global")
        result.copy_(source * 2)
        assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
        graph.capture_end()
    graph.replay()
    bench.finish()
    assert result.tolist() == [2.0] * 8


def test_memory_can_be_pinned_while_a_graph_is_captured() -> None:
    source, result = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    arena = Arena(config=CFConfig(num_slots=1), pinner=DevicePinner(CudaDevice()))
    arena.allocate(1 << 20)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        result.copy_(source * 2)
    graph.replay()
    assert result.tolist() == [2.0] * 8
    arena.close()


def test_slots_are_pinned_and_given_back() -> None:
    torch.zeros(1, device="cuda")
    arena = Arena(config=CFConfig(num_slots=1), pinner=DevicePinner(CudaDevice()))
    arena.allocate(1 << 20)
    (slot,) = arena.slots
    assert slot.unpin is not None
    assert torch.frombuffer(slot.memory, dtype=torch.uint8).is_pinned()
    arena.close()
    torch.cuda.synchronize()


def test_a_failed_pinning_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    torch.zeros(1, device="cuda")
    pinner = DevicePinner(CudaDevice())
    assert pinner.pin(0, 4096) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    torch.ones(8, device="cuda").add_(1)  # would raise it
    torch.cuda.synchronize()


def test_unpinned_slots_work() -> None:
    class NoPinner(DevicePinner):
        def pin(self, address: int, num_bytes: int) -> None:
            return None

    arena = Arena(config=CFConfig(num_slots=1))
    arena.allocate(16 << 20)
    slot = arena.acquire()
    assert slot is not None
    weight = torch.full((LARGE,), 3.0, device="cuda")
    engine = DeviceEngine(CudaDevice(), pinner=NoPinner(CudaDevice()))
    errors: list[BaseException | None] = []
    copy = Copy("w", weight, 4096, LARGE * 4, True)
    engine.start([copy], slot, on_copied=errors.append)
    engine.fence(timeout_s=0.0)
    weight.fill_(4)
    assert engine.wait_copied(timeout_s=DEADLINE_S)
    engine.close()
    assert errors == [None]
    assert bool((Taken([copy], slot)["w"] == 3).all())
    arena.close()


def test_the_device_buffer_is_given_back_when_snapshots_go_to_the_host_again(bench: Bench) -> None:
    weight = torch.ones(LARGE, device="cuda")
    before = torch.cuda.memory_allocated()
    bench.take({"w": (weight, True)}, SnapshotPlace.DEVICE)
    bench.engine.place = SnapshotPlace.HOST
    assert torch.cuda.memory_allocated() >= before + LARGE * 4
    bench.finish()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@PLACES
def test_two_devices_in_one_process(bench: Bench, place: SnapshotPlace) -> None:
    weights = [torch.ones(LARGE, device=f"cuda:{n}") for n in range(2)]
    taken = bench.take({f"w{n}": (w, True) for n, w in enumerate(weights)}, place)
    bench.engine.fence(timeout_s=0.0)
    for weight in weights:
        weight.fill_(2)
    bench.finish()
    assert all(bool((taken[f"w{n}"] == 1).all()) for n in range(2))
