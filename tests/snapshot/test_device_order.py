"""Streams of every kind and several devices: what orders a snapshot, and what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from checkfreq.types import SnapshotPlace
from tests.snapshot.fake_device import FakeDevice, Scripted, Seeded
from tests.snapshot.fake_streams import FakeStream, Kind
from tests.snapshot.recorder import PLACES, Recorder, State, small_state

CUDA = torch.device("cuda", 0)
KINDS = pytest.mark.parametrize("kind", list(Kind))
SEEDS = range(30)


def weight_of(fake: FakeDevice) -> State:
    state = State(fake)
    state.add("weight", torch.arange(6.0), settled=True)
    return state


@PLACES
@KINDS
@pytest.mark.parametrize("seed", SEEDS)
def test_training_may_run_on_any_kind_of_stream(
    place: SnapshotPlace, kind: Kind, seed: int
) -> None:
    fake = FakeDevice(Seeded(seed))
    if kind is not Kind.DEFAULT:
        fake.use_new_stream(kind=kind)
    recorder = Recorder(fake, small_state(fake))
    for step in range(4):
        recorder.state.write("running_mean", 10 * step + 1)
        fake.run_some()
        recorder.update(["weight", "bias"], 10 * step + 2)
        recorder.take(place)
    recorder.finish()


@PLACES
@KINDS
@pytest.mark.parametrize("seed", SEEDS)
def test_an_update_on_a_users_stream_that_follows_the_fence_comes_after_the_copy(
    place: SnapshotPlace, kind: Kind, seed: int
) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, weight_of(fake))
    other = fake.users_stream(kind=kind)
    recorder.take(place)
    recorder.update([], 0)
    fake.order(fake.current_stream(CUDA), other)
    fake.training_writes(recorder.state.tensors["weight"], 9, stream=other)
    recorder.finish()


@PLACES
@pytest.mark.parametrize("seed", SEEDS)
def test_work_of_a_users_stream_that_the_boundary_follows_is_in_the_snapshot(
    place: SnapshotPlace, seed: int
) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, weight_of(fake))
    other = fake.users_stream()
    write(recorder, 5, stream=other)
    fake.order(other, fake.current_stream(CUDA))
    recorder.take(place)
    recorder.finish()


@PLACES
@pytest.mark.parametrize("seed", SEEDS)
def test_a_blocking_stream_is_ordered_with_the_default_stream_by_the_device(
    place: SnapshotPlace, seed: int
) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, weight_of(fake))
    other = fake.users_stream(kind=Kind.BLOCKING)
    write(recorder, 5, stream=other)
    recorder.take(place)
    recorder.update([], 0)
    fake.training_writes(recorder.state.tensors["weight"], 9, stream=other)
    recorder.finish()


@PLACES
@pytest.mark.parametrize("seed", SEEDS)
def test_an_update_on_a_stream_that_nothing_joins_is_in_the_snapshot(
    place: SnapshotPlace, seed: int
) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, small_state(fake))
    own = fake.users_stream()
    for step in range(4):
        with fake.on(own):
            recorder.state.write("running_mean", 10 * step + 1)
            fake.run_some()
            recorder.update(["weight", "bias"], 10 * step + 2)
            recorder.state.write("table", 10 * step + 3)  # after the update, as a GradScaler does
        recorder.take(place)
    with fake.on(own):
        recorder.state.write("running_mean", 99)
    recorder.finish()


@PLACES
@pytest.mark.parametrize("seed", SEEDS)
def test_updates_on_several_streams_are_in_the_snapshot(place: SnapshotPlace, seed: int) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, small_state(fake))
    streams = [fake.users_stream() for _ in range(2)]
    activations = fake.tensor(torch.ones(1))
    for step in range(3):
        for stream, name in zip(streams, ("weight", "bias"), strict=True):
            with fake.on(stream):
                for _ in range(8):
                    fake.training_writes(activations, step)
                recorder.update([name], step)
        recorder.take(place)
        fake.run_some()
    recorder.finish()


@PLACES
@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_without_an_update_since_the_last_is_ordered_like_that(
    place: SnapshotPlace, seed: int
) -> None:
    """A loop that accumulates gradients on a stream of its own changes volatile state alone."""
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, small_state(fake))
    own = fake.users_stream()
    for step in range(4):
        with fake.on(own):
            recorder.state.write("running_mean", step)
            if step == 0:
                recorder.update(["weight"], 7)
        recorder.take(place)
    recorder.finish()


def test_a_users_stream_that_nothing_orders_tears_snapshots_on_this_device() -> None:
    def is_torn(seed: int) -> bool:
        fake = FakeDevice(Seeded(seed))
        recorder = Recorder(fake, weight_of(fake))
        recorder.take()
        recorder.update([], 0)
        fake.training_writes(recorder.state.tensors["weight"], 9, stream=fake.users_stream())
        return fails(recorder.finish)

    assert any(is_torn(seed) for seed in SEEDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_device_has_its_streams_and_its_fence(seed: int) -> None:
    fake = FakeDevice(Seeded(seed))
    state = State(fake)
    for index in range(2):
        state.add(f"weight{index}", torch.arange(6.0), settled=True, index=index)
    recorder = Recorder(fake, state)
    for step in range(3):
        fake.use_new_stream(step % 2, after_the_old_one=True)
        recorder.update(["weight0", "weight1"], step)
        recorder.take()
    recorder.update(["weight0", "weight1"], 9)
    recorder.finish()


@pytest.mark.parametrize("seed", SEEDS)
def test_waits_can_be_measured_at_any_time(seed: int) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, small_state(fake))
    for step in range(3):
        recorder.update(["weight"], step)
        recorder.take()
        fake.run_some()
        assert recorder.engine.device_wait_s >= 0.0
    recorder.finish()
    assert recorder.engine.device_wait_s >= 0.0


def test_the_device_tells_no_time_of_an_event_that_is_pending_or_of_another_device() -> None:
    fake = FakeDevice(Scripted())
    events = [fake.record(fake.current_stream(torch.device("cuda", n))) for n in (0, 0, 1)]
    with pytest.raises(RuntimeError, match="has not happened"):
        fake.elapsed_s(events[0], events[1])
    fake.run_all()
    assert fake.elapsed_s(events[0], events[1]) == 1.0
    with pytest.raises(RuntimeError, match="two devices"):
        fake.elapsed_s(events[0], events[2])


def write(recorder: Recorder, value: float, *, stream: FakeStream) -> None:
    """The weight of the state, on another stream than the current one."""
    weight = recorder.state.tensors["weight"]
    recorder.fake.training_writes(weight, value, stream=stream)
    recorder.state._values["weight"] = torch.full_like(weight, value)


def fails(call: Callable[[], None]) -> bool:
    try:
        call()
    except AssertionError:
        return True
    return False
