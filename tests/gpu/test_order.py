"""Every wait, record, keep and order of a snapshot, with the delay that shows if it is missing.

Copies are late, or the work before them is. The host never waits between what is ordered.
tests/mutations removes each of them in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device_copier import Limits
from checkfreq.types import SnapshotPlace
from tests.gpu.bench import (
    DEADLINE_S,
    LARGE,
    LONG,
    PLACES,
    SHORT,
    Bench,
    HeldHelper,
    LateDevice,
    Taken,
    Tensors,
)

#: Warnings of CUDA libraries and of PyTorch's own debug modes are not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

Benches = Callable[..., Bench]


@pytest.fixture
def make() -> Iterator[Benches]:
    """Makes a bench on a device, which is late by default."""
    made: list[Bench] = []

    def one(device: CudaDevice | None = None, **options: Any) -> Bench:
        made.append(Bench(device=device or LateDevice(), **options))
        return made[-1]

    yield one
    for bench in made:
        bench.close()


def tensors(value: float = 0.0, *, names: str = "small mean large table") -> Tensors:
    """Small and large ones, settled (``small`` and ``large``) and volatile."""
    made = {
        "small": (100, True),
        "mean": (100, False),
        "large": (4 * LARGE, True),
        "table": (LARGE, False),
    }
    return {
        name: (torch.full((made[name][0],), value, device="cuda"), made[name][1])
        for name in names.split()
    }


def write(tensors: Tensors, value: float, *, settled: bool | None = None) -> None:
    for tensor, is_settled in tensors.values():
        if settled in (None, is_settled):
            tensor.fill_(value)


def only(value: float, taken: Taken) -> None:
    """Each tensor of the snapshot has this value everywhere."""
    found = taken.values()
    assert found == {name: {value} for name in found}


def reuse(num_elements: int, *, num: int = 16) -> list[torch.Tensor]:
    """Take free memory of the current stream, and write to it."""
    return [torch.full((num_elements,), 7.0, device="cuda") for _ in range(num)]


# ---- what the copies come after, and what comes after them


@PLACES
@pytest.mark.parametrize("names", ["small mean large table", "small mean"])
def test_a_copy_comes_after_the_work_that_was_queued_before_it(
    make: Benches, place: SnapshotPlace, names: str
) -> None:
    bench = make(LateDevice(copy=SHORT, pack=10 * SHORT, every=True))
    state = tensors(names=names)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * SHORT)
    write(state, 1)
    taken = bench.take(state, place)
    bench.finish()
    only(1, taken)


@PLACES
def test_volatile_state_is_copied_before_what_is_queued_next(
    make: Benches, place: SnapshotPlace
) -> None:
    bench, state = make(), tensors(1)
    taken = bench.take(state, place)
    write(state, 2, settled=False)
    bench.finish()
    only(1, taken)


@PLACES
@pytest.mark.parametrize("names", ["small mean large table", "large"])
def test_an_update_behind_the_fence_comes_after_a_late_copy(
    make: Benches, place: SnapshotPlace, names: str
) -> None:
    bench, state = make(), tensors(1, names=names)
    taken = bench.take(state, place)
    assert bench.engine.fence(timeout_s=0.0) == 0.0
    write(state, 2)
    bench.finish()
    only(1, taken)
    assert all(bool((tensor == 2).all()) for tensor, _ in state.values())
    assert bench.engine.device_wait_s > 0.0


@PLACES
def test_an_update_on_any_stream_comes_after_a_late_copy(
    make: Benches, place: SnapshotPlace
) -> None:
    bench, state = make(), tensors(1)
    taken = bench.take(state, place)
    bench.engine.fence(timeout_s=0.0)
    with torch.cuda.stream(torch.cuda.Stream()):
        bench.engine.fence(timeout_s=0.0)
        write(state, 2, settled=True)
    bench.finish()
    only(1, taken)


@PLACES
def test_an_update_on_a_stream_that_nothing_joins_is_in_the_snapshot(
    make: Benches, place: SnapshotPlace
) -> None:
    bench, state, own = make(), tensors(0), torch.cuda.Stream()
    torch.cuda.synchronize()
    for step in range(1, 4):
        with torch.cuda.stream(own):
            torch.cuda._sleep(10 * SHORT)
            bench.update(state, step, settled=None)
        taken = bench.take(state, place)
        with torch.cuda.stream(own):
            write(state, 9, settled=False)
        assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
        bench.arena.release(taken.slot)
        only(step, taken)
    bench.finish()


@PLACES
def test_updates_on_several_streams_are_in_the_snapshot(
    make: Benches, place: SnapshotPlace
) -> None:
    bench, state = make(), tensors(0)
    torch.cuda.synchronize()
    for name, tensor in state.items():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10 * SHORT)
            bench.update({name: tensor}, 1, settled=None)
    taken = bench.take(state, place)
    bench.finish()
    only(1, taken)


@PLACES
def test_training_runs_beside_a_late_copy(make: Benches, place: SnapshotPlace) -> None:
    """To the host until the fence; a device snapshot lets the update run as well."""
    device = LateDevice(copy=LONG, pack=0)
    bench, state = make(device), tensors(1)
    taken = bench.take(state, place)
    write(state, 2, settled=False)
    if place is SnapshotPlace.DEVICE:
        bench.engine.fence(timeout_s=0.0)
        write(state, 2)
    trained = torch.cuda.Event()
    trained.record()
    trained.synchronize()
    assert not device.latest_on_side.query(), "training waited for the whole copy"
    bench.finish()
    only(1, taken)


@PLACES
def test_a_second_snapshot_leaves_the_first_alone(make: Benches, place: SnapshotPlace) -> None:
    bench, state = make(), tensors(1)
    first = bench.take(state, place)
    write(state, 2, settled=False)
    bench.engine.fence(timeout_s=0.0)
    write(state, 2)
    second = bench.take(state, place)
    bench.finish()
    only(1, first)
    only(2, second)


@PLACES
def test_a_state_that_many_updates_change_is_that_of_its_boundary(
    make: Benches, place: SnapshotPlace
) -> None:
    bench, state = make(LateDevice(copy=SHORT // 10, pack=SHORT // 10)), tensors(0)
    for step in range(1, 21):
        taken = bench.take(state, place)
        expected = {name: tensor.clone() for name, (tensor, _) in state.items()}
        torch.cuda._sleep(SHORT // 20)
        write(state, step, settled=False)
        bench.engine.fence(timeout_s=0.0)
        write(state, step)
        assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
        for name, tensor in expected.items():
            assert torch.equal(taken[name], tensor.cpu()), (step, name)
        bench.arena.release(taken.slot)
    bench.finish()


@PLACES
def test_small_tensors_in_many_rounds_are_those_of_the_boundary(
    make: Benches, place: SnapshotPlace
) -> None:
    """More than the staging buffer takes at a time, of two dtypes, settled ones and others."""
    bench = make(limits=Limits(staging_bytes=1 << 20))
    state: Tensors = {}
    for number in range(400):
        dtype = torch.bfloat16 if number % 3 else torch.float32
        one = torch.full((64, 64), 0.0, device="cuda", dtype=dtype)
        state[f"t{number}"] = one, number % 2 == 1
    for value in (1, 2):
        write(state, value)
        taken = bench.take(state, place)
        write(state, 3, settled=False)
        bench.engine.fence(timeout_s=0.0)
        write(state, 3)
        assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
        only(value, taken)
    bench.finish()


@PLACES
def test_small_storage_resized_away_is_not_reused_before_a_late_copy(
    make: Benches, place: SnapshotPlace
) -> None:
    """Those of the later rounds are read beside the stream that their memory belongs to."""
    bench = make(limits=Limits(staging_bytes=300 << 10))
    state = {f"t{n}": (torch.full((40_000,), 1.0, device="cuda"), True) for n in range(8)}
    taken = bench.take(state, place)
    for tensor, _ in state.values():
        tensor.untyped_storage().resize_(0)
    blocks = reuse(40_000, num=64)
    bench.finish()
    only(1, taken)
    assert blocks


# ---- memory that is freed while copies read it


@PLACES
def test_storage_resized_away_is_not_reused_before_a_late_copy(
    make: Benches, place: SnapshotPlace
) -> None:
    bench, state = make(), tensors(1, names="large")
    taken = bench.take(state, place)
    state["large"][0].untyped_storage().resize_(0)
    blocks = reuse(4 * LARGE)
    bench.finish()
    only(1, taken)
    assert blocks


@PLACES
def test_a_dropped_source_of_another_stream_outlives_its_copy(
    make: Benches, place: SnapshotPlace
) -> None:
    bench, other = make(LateDevice(every=True)), torch.cuda.Stream()
    with torch.cuda.stream(other):
        state = tensors(1, names="table mean")
    torch.cuda.synchronize()
    taken = bench.take(state, place)
    state.clear()
    with torch.cuda.stream(other):
        blocks = [reuse(100, num=64), reuse(LARGE)]
    bench.finish()
    only(1, taken)
    assert blocks


def test_a_staging_buffer_that_is_replaced_outlives_its_copies(make: Benches) -> None:
    bench, other = make(), torch.cuda.Stream()
    few, many = tensors(1, names="mean"), tensors(1, names="small mean")
    first = bench.take(few)
    with torch.cuda.stream(other):
        second = bench.take(many)
    blocks = reuse(100, num=64)
    bench.finish()
    only(1, first)
    only(1, second)
    assert blocks


def test_a_device_buffer_that_is_given_back_outlives_its_copies(make: Benches) -> None:
    bench, state = make(), tensors(1, names="large")
    first = bench.take(state, SnapshotPlace.DEVICE)
    second = bench.take(state, SnapshotPlace.DEVICE)
    bench.engine.place = SnapshotPlace.HOST  # the first to end gives back what both use
    until_s = time.monotonic() + DEADLINE_S
    while not bench.errors:
        assert time.monotonic() < until_s
    blocks = reuse(4 * LARGE)
    bench.finish()
    only(1, first)
    only(1, second)
    assert blocks


# ---- the end


@PLACES
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("names", ["small mean large table", "small mean", "large", "table"])
def test_a_slot_that_is_reported_complete_is(
    make: Benches, place: SnapshotPlace, names: str, every: bool
) -> None:
    bench = make(LateDevice(every=every))
    seen: list[dict[str, set[float]]] = []
    bench.take(tensors(1, names=names), place, on_copied=lambda taken: seen.append(taken.values()))
    bench.finish()
    assert seen == [{name: {1.0} for name in names.split()}]


def test_host_tensors_are_copied_before_start_returns(make: Benches) -> None:
    helper = HeldHelper()
    bench = make(helper=helper)
    step = torch.tensor([1.0])
    taken = bench.take({**tensors(1, names="large"), "step": (step, False)})
    step.fill_(2)
    helper.run()
    bench.finish()
    only(1, taken)


@PLACES
def test_an_update_of_a_large_host_tensor_comes_after_its_copy(
    make: Benches, place: SnapshotPlace
) -> None:
    bench = make()
    state = {**tensors(), "exp_avg": (torch.zeros(8 * LARGE), True)}
    found = []
    for value in (1, 2):  # the second while the device still copies for the first
        write(state, value)
        found.append(bench.take(state, place))
        bench.engine.fence(timeout_s=DEADLINE_S)
        write(state, 9)
    bench.finish()
    only(1, found[0])
    only(2, found[1])


@pytest.mark.parametrize("fail_at", [3, 4])
def test_a_failed_snapshot_is_reported_after_its_copies(make: Benches, fail_at: int) -> None:
    bench = make(LateDevice(every=True, fail_at=fail_at))

    def give_to_others(taken: Taken) -> None:
        taken.slot.memory[:] = b"\xdd" * len(taken.slot.memory)

    taken = bench.take(tensors(1), on_copied=give_to_others)
    assert bench.engine.wait_copied(timeout_s=DEADLINE_S)
    bench.engine.close()
    torch.cuda.synchronize()
    assert [str(error) for error in bench.errors] == ["the device refuses"]
    memory = taken.slot.memory
    assert memory[:] == b"\xdd" * len(memory), "a copy into a slot that was given up"
