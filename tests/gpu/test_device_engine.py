"""The device engine on a real device: the same ordering, with real streams under load.

Nothing here measures time. Orders that only delays bring to light are in test_order.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from checkfreq.config import CFConfig
from checkfreq.snapshot.arena import Arena
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device_copier import Limits
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import Copy
from checkfreq.types import SnapshotPlace
from tests.gpu.bench import (
    DEADLINE_S,
    LARGE,
    PLACES,
    SHORT,
    Bench,
    Taken,
    host_must_not_wait,
    same_bits,
)

#: Warnings of CUDA libraries and of PyTorch's own debug modes are not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


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
        "offloaded": (torch.ones(LARGE), True),
    }
    bench.engine.place = place
    bench.take(tensors, place)  # buffers are allocated once
    assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
    with host_must_not_wait():
        bench.take(tensors, place)
        bench.engine.fence(timeout_s=DEADLINE_S)  # for the host's own copy
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
def test_a_tensor_that_is_replaced_by_one_with_other_strides_is_copied_as_it_lies(
    bench: Bench, place: SnapshotPlace
) -> None:
    square = torch.arange(64 * 64, device="cuda").to(torch.bfloat16).view(64, 64)
    for one in (square, square.t(), square.clone()):
        taken = bench.take({"square": (one, True), "other": (square, False)}, place)
        assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
        assert same_bits(taken["square"], one)
        bench.arena.release(taken.slot)
    bench.finish()


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


def test_unpinned_slots_work() -> None:
    arena = Arena(config=CFConfig(num_slots=1))
    arena.allocate(16 << 20)
    slot = arena.acquire()
    assert slot is not None
    weight = torch.full((LARGE,), 3.0, device="cuda")
    engine = DeviceEngine(CudaDevice())
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
