"""Snapshots of device tensors hold the boundary's values in every order a device may run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from checkfreq.snapshot.device_copier import Limits
from checkfreq.snapshot.device_watch import BUFFER_BYTES
from checkfreq.snapshot.watch import UnannouncedWrite
from checkfreq.types import SnapshotPlace
from tests.snapshot.fake_device import Chooser, FakeDevice, Seeded, every_schedule
from tests.snapshot.recorder import PLACES, TINY, Recorder, State, small_state, state_of

WEIGHT = {"weight": torch.arange(3.0)}
UNBUFFERED = Limits(small_bytes=0, reserve_bytes=0)


def in_every_order(
    scenario: Callable[[Recorder], int | None],
    make: Callable[[FakeDevice], State],
    *,
    limits: Limits = TINY,
) -> None:
    """Run a scenario, which returns the number of failed snapshots, under every schedule."""

    def run(chooser: Chooser) -> None:
        fake = FakeDevice(chooser, eager_events=True)
        recorder = Recorder(fake, make(fake), limits=limits)
        recorder.finish(errors=scenario(recorder) or 0)

    assert every_schedule(run) > 10


@PLACES
def test_every_order_of_streams_gives_the_boundary(place: SnapshotPlace) -> None:
    def scenario(recorder: Recorder) -> None:
        recorder.state.write("weight", 5)  # the update of this boundary is still queued
        recorder.take(place)
        recorder.state.write("running_mean", 7)
        recorder.update(["weight"], 8)

    volatile = {"running_mean": torch.arange(1.0)}
    in_every_order(scenario, lambda fake: state_of(fake, settled=WEIGHT, volatile=volatile))


@PLACES
def test_in_every_order_a_write_that_asks_no_fence_voids_what_it_tears(
    place: SnapshotPlace,
) -> None:
    """The watch reads all of so small a tensor, so nothing torn can be reported complete."""
    outcomes = set()

    def scenario(recorder: Recorder) -> int:
        recorder.take(place)
        recorder.state.write("weight", 8)
        recorder.fake.run_all()
        (error,) = recorder.reports  # the recorder compares what is reported complete
        outcomes.add(type(error))
        assert error is None or "weight" in str(error)
        return error is not None

    in_every_order(scenario, lambda fake: state_of(fake, settled=WEIGHT, watched=True))
    assert outcomes == {type(None), UnannouncedWrite}


def test_a_second_snapshot_does_not_disturb_the_first() -> None:
    def scenario(recorder: Recorder) -> None:
        for value in (7, 8):
            recorder.take()
            recorder.state.write("running_mean", value)

    volatile = {"running_mean": torch.arange(1.0)}
    in_every_order(scenario, lambda fake: state_of(fake, volatile=volatile))


# ---- the watch, where memory is short


@PLACES
@pytest.mark.parametrize("seed", range(5))
def test_without_memory_for_the_watch_no_write_comes_between(
    place: SnapshotPlace, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, state_of(fake, settled=WEIGHT, watched=True), limits=UNBUFFERED)
    fake.memory().free = BUFFER_BYTES - 1
    for step in range(3):
        recorder.take(place)
        recorder.state.write("weight", step)  # asks no fence
    recorder.finish()
    assert fake.memory().ooms == 1, "asked for once where there is no room"
    assert caplog.text.count("no room for 4096 bytes in which to watch") == 1


# ---- random orders


@PLACES
@pytest.mark.parametrize("seed", range(30))
def test_training_never_leaks_into_a_snapshot(place: SnapshotPlace, seed: int) -> None:
    fake = FakeDevice(Seeded(seed))
    state = small_state(fake)
    state.is_watched = seed % 2 == 0
    recorder = Recorder(fake, state)
    for step in range(4):
        for name in ("running_mean", "table", "step"):  # forward
            state.write(name, 10 * step + 1)
        fake.run_some()
        recorder.update(["weight", "bias"], 10 * step + 2)
        state.write("step", 10 * step + 3)
        recorder.take(place)
        state.write("step", 10 * step + 4)
    recorder.finish()


@pytest.mark.parametrize("seed", range(80))
def test_random_states_places_devices_and_rebinding(seed: int) -> None:
    fake, draw = FakeDevice(Seeded(seed)), random.Random(seed)
    state = State(fake, is_watched=seed % 2 == 0)
    for number in range(draw.randrange(1, 12)):
        state.add(
            f"t{number}",
            random_values(draw),
            settled=draw.random() < 0.6,
            index=draw.choice([0, 1, None]),
        )
    larger = replace(TINY, small_bytes=draw.choice([8, 96]), staging_bytes=draw.choice([112, 999]))
    recorder = Recorder(fake, state, limits=draw.choice([TINY, larger]))
    for step in range(6):
        volatile = [name for name in state.tensors if name not in state.settled]
        for name in draw.sample(volatile, len(volatile) // 2):
            state.write(name, step % 2)
        if draw.random() < 0.3:
            fake.use_new_stream(draw.randrange(2))
        recorder.update(draw.sample(sorted(state.settled), len(state.settled) // 2), step % 2)
        rebind(state, draw)
        recorder.take(draw.choice(list(SnapshotPlace)))
        fake.run_some()
    recorder.finish()


def random_values(draw: random.Random) -> Tensor:
    dtype = draw.choice(
        [
            *(torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool),
            *(torch.complex64, torch.complex128, torch.float16),
        ]
    )
    shape = draw.choice([(), (1,), (5,), (3, 4), (2, 3, 2, 2), (0, 3)])
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(99)))
    values = values.to(dtype)
    if values.dim() == 2 and draw.random() < 0.5:
        return values.t()
    if values.dim() == 4 and draw.random() < 0.5:
        return values.contiguous(memory_format=torch.channels_last)
    return values


def rebind(state: State, draw: random.Random) -> None:
    """Replace tensors as LBFGS does: an old one loses its last reference during a copy."""
    name = draw.choice(list(state.tensors))
    if state.tensors[name].numel():
        values = state._values[name].clone(memory_format=torch.contiguous_format)
        is_on_host = state.fake.owner(state.tensors[name]) is None
        values = values + 1 if values.is_floating_point() else values
        state.put(name, values if is_on_host else state.fake.tensor(values))


# ---- the sources


@PLACES
def test_a_source_that_training_drops_is_kept_until_it_is_copied(
    fake: FakeDevice, recorder: Recorder, place: SnapshotPlace
) -> None:
    recorder.take(place)
    before = fake.num_allocated
    recorder.state.tensors.clear()
    assert fake.num_allocated == before
    fake.run_all()
    assert fake.num_allocated < before, "nor longer"
    recorder.finish()


@PLACES
@pytest.mark.parametrize("seed", range(10))
def test_storage_freed_under_its_references_is_not_reused_while_it_is_copied(
    place: SnapshotPlace, seed: int
) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, small_state(fake))
    recorder.take(place)
    fake.training_frees_storage(recorder.state.tensors["weight"])
    recorder.finish()


# ---- the fence


@PLACES
def test_the_fence_holds_the_update_back_but_not_the_host(
    fake: FakeDevice, recorder: Recorder, place: SnapshotPlace
) -> None:
    recorder.take(place)
    recorder.update(["weight"], 9)  # FakeDevice.synchronize refuses the training thread
    assert not fake.is_idle, "nothing has run yet"
    assert recorder.reports == []
    assert recorder.engine.device_wait_s == 0.0
    recorder.finish()
    assert recorder.state.tensors["weight"].tolist() == [9.0] * 6
    assert recorder.engine.device_wait_s > 0.0


def test_an_update_on_a_different_stream_waits_too() -> None:
    for seed in range(20):
        fake = FakeDevice(Seeded(seed))
        recorder = Recorder(fake, small_state(fake))
        recorder.take()
        recorder.update([], 0)
        fake.use_new_stream(after_the_old_one=False)
        recorder.update(["weight"], 9)
        recorder.finish()


# ---- few copies


def test_small_tensors_are_copied_in_one_transfer(fake: FakeDevice) -> None:
    state = State(fake)
    for number in range(30):
        state.add(f"t{number}", torch.full((number % 3,), 1.0), settled=number % 2 == 0)
    recorder = Recorder(fake, state, limits=Limits())
    recorder.take()
    assert (fake.num_packs, fake.num_copies) == (2, 1), "one for each class, and one transfer"
    recorder.finish()


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("is_freed", [False, True], ids=["", "freed under their references"])
def test_small_tensors_beyond_the_staging_buffer_go_through_it_in_rounds(
    seed: int, is_freed: bool
) -> None:
    fake = FakeDevice(Seeded(seed))
    state = many_small(fake)
    recorder = Recorder(fake, state)
    before = fake.num_allocated
    for step in range(1 if is_freed else 3):
        recorder.take()
        assert fake.num_allocated == before + TINY.staging_bytes
        if is_freed:
            for name in state.settled:
                fake.training_frees_storage(state.tensors[name])
            break
        for name in [*state.tensors][::2]:  # volatile ones, by what is queued next
            state.write(name, step)
        recorder.update([*state.tensors][1::2], step)
        fake.run_some()
    recorder.finish()


def many_small(fake: FakeDevice) -> State:
    """Of two dtypes, every other one volatile; some four rounds."""
    state = State(fake)
    for number in range(16):
        dtype = torch.bfloat16 if number % 3 else torch.float32
        state.add(f"t{number}", torch.arange(2.0).to(dtype), settled=number % 2 == 1)
    return state


#: One tensor after the other of the same number of bytes.
FORMS: list[Callable[[Tensor], Tensor]] = [
    lambda matrix: matrix,
    lambda matrix: matrix.t(),
    lambda matrix: matrix.view(4, 3),
    lambda matrix: matrix.view(torch.int64),
    lambda matrix: matrix.conj(),
    lambda matrix: torch._neg_view(matrix),
    lambda matrix: torch.view_as_real(matrix).view(6, 4),
]


@PLACES
def test_a_tensor_that_is_replaced_by_one_of_another_form_is_copied_as_it_lies(
    fake: FakeDevice, place: SnapshotPlace
) -> None:
    state = many_small(fake)
    matrix = torch.view_as_complex(torch.arange(1.0, 25.0).view(3, 4, 2))
    recorder = Recorder(fake, state, limits=replace(TINY, small_bytes=96, staging_bytes=256))
    for form in FORMS:
        state.put("matrix", form(fake.tensor(matrix)))
        recorder.take(place)
        fake.run_all()
    recorder.finish()


@pytest.mark.parametrize("seed", range(10))
def test_a_state_that_grows_gets_larger_buffers_while_the_old_ones_are_read(seed: int) -> None:
    fake = FakeDevice(Seeded(seed))
    state = State(fake)
    recorder = Recorder(fake, state)
    for number in range(1, 5):
        state.add(f"small{number}", torch.arange(1.0))
        state.add(f"strided{number}", torch.arange(4.0 * number).reshape(2, -1).t())
        recorder.take(random.Random(seed + number).choice(list(SnapshotPlace)))
    recorder.finish()


def test_a_strided_tensor_is_not_copied_whole_on_the_device(fake: FakeDevice) -> None:
    state = state_of(fake, settled={"weight": torch.arange(64.0).reshape(8, 8).t()})
    before = fake.num_allocated
    recorder = Recorder(fake, state)
    recorder.take()
    assert fake.num_allocated == before + TINY.transpose_bytes
    recorder.finish()


# ---- device snapshots


def test_a_device_snapshot_lets_the_update_run_before_the_transfer_is_done() -> None:
    def can_update_before_the_transfer_ends(place: SnapshotPlace, seed: int) -> bool:
        fake = FakeDevice(Seeded(seed), eager_events=True)
        recorder = Recorder(fake, state_of(fake, settled={"weight": torch.arange(6.0)}))
        recorder.take(place)
        recorder.update(["weight"], 9)
        weight = recorder.state.tensors["weight"]
        while weight[0] != 9:
            fake.run_one()
        early = not fake.is_idle
        recorder.finish()
        return early

    seeds = range(30)
    assert any(can_update_before_the_transfer_ends(SnapshotPlace.DEVICE, s) for s in seeds)
    assert not any(can_update_before_the_transfer_ends(SnapshotPlace.HOST, s) for s in seeds)


@pytest.mark.parametrize("seed", range(10))
def test_the_device_buffer_may_be_given_back_in_the_middle_of_a_copy(seed: int) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, small_state(fake))
    before = fake.num_allocated
    recorder.take(SnapshotPlace.DEVICE)
    recorder.take(SnapshotPlace.DEVICE)
    recorder.engine.place = SnapshotPlace.HOST  # the first to finish gives back what both use
    fake.run_some()
    recorder.take(SnapshotPlace.DEVICE)
    recorder.engine.place = SnapshotPlace.HOST
    fake.run_all()
    assert fake.num_allocated == before, "snapshots go to the host again"
    recorder.finish()


# ---- errors


@PLACES
def test_an_error_at_any_call_voids_the_slot_after_all_copies_into_it(
    place: SnapshotPlace,
) -> None:
    def calls_of_a_snapshot(fail_at: int | None, seed: int) -> int:
        fake = FakeDevice(Seeded(seed))
        state = small_state(fake)
        state.add("strided", torch.arange(16.0).reshape(4, 4).t(), settled=True)
        state.add("elsewhere", torch.arange(5.0), index=1)
        state.add("offloaded", torch.arange(5.0), settled=True, index=None)
        recorder = Recorder(fake, state)
        before = fake.num_calls
        fake.fail_at = None if fail_at is None else before + fail_at
        recorder.take(place)
        num_calls = fake.num_calls - before
        recorder.update(["weight"], 1)
        recorder.take(place)
        recorder.finish(errors=0 if fail_at is None else 1)
        return num_calls

    for fail_at in range(1, calls_of_a_snapshot(None, 0) + 1):
        for seed in range(3):
            calls_of_a_snapshot(fail_at, seed)


def test_an_interrupt_while_queuing_voids_the_slot_and_is_raised(
    fake: FakeDevice, recorder: Recorder
) -> None:
    def interrupt(pairs: object, *, stream: object) -> None:
        raise KeyboardInterrupt

    fake.copy = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        recorder.take()
    recorder.finish(errors=1)


# ---- the real helper thread
