"""Streams of every kind and several devices: what orders a snapshot, and what does not."""

from __future__ import annotations

import pytest
import torch

from checkfreq.types import SnapshotPlace
from tests.snapshot.fake_device import FakeDevice, Seeded
from tests.snapshot.fake_streams import FakeStream, Kind
from tests.snapshot.recorder import PLACES, Recorder, State, small_state, state_of

CUDA = torch.device("cuda", 0)
KINDS = pytest.mark.parametrize("kind", list(Kind))
SEEDS = range(12)


def with_a_weight(seed: int) -> Recorder:
    fake = FakeDevice(Seeded(seed))
    return Recorder(fake, state_of(fake, settled={"weight": torch.arange(6.0)}))


def with_all(seed: int) -> Recorder:
    fake = FakeDevice(Seeded(seed))
    return Recorder(fake, small_state(fake))


@PLACES
@KINDS
@pytest.mark.parametrize("seed", SEEDS)
def test_training_may_run_on_any_kind_of_stream(
    place: SnapshotPlace, kind: Kind, seed: int
) -> None:
    recorder = with_all(seed)
    if kind is not Kind.DEFAULT:
        recorder.fake.use_new_stream(kind=kind)
    for step in range(4):
        recorder.state.write("running_mean", 10 * step + 1)
        recorder.fake.run_some()
        recorder.update(["weight", "bias"], 10 * step + 2)
        recorder.take(place)
        assert recorder.engine.device_wait_s >= 0.0, "can be measured at any time"
    recorder.finish()


@PLACES
@KINDS
@pytest.mark.parametrize("seed", SEEDS)
def test_a_users_stream_before_the_boundary_and_behind_the_fence_is_followed(
    place: SnapshotPlace, kind: Kind, seed: int
) -> None:
    """A blocking stream is ordered with the default stream by the device."""
    recorder = with_a_weight(seed)
    fake, other = recorder.fake, recorder.fake.users_stream(kind=kind)
    write(recorder, 5, stream=other)
    if kind is not Kind.BLOCKING:
        fake.order(other, fake.current_stream(CUDA))
    recorder.take(place)
    recorder.update([], 0)
    if kind is not Kind.BLOCKING:
        fake.order(fake.current_stream(CUDA), other)
    write(recorder, 9, stream=other)
    recorder.finish()


@PLACES
@pytest.mark.parametrize("num_updates", [4, 1], ids=["", "without an update since the last"])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_update_on_a_stream_that_nothing_joins_is_in_the_snapshot(
    place: SnapshotPlace, num_updates: int, seed: int
) -> None:
    """A loop that accumulates gradients there changes volatile state alone in between."""
    recorder = with_all(seed)
    own = recorder.fake.users_stream()
    for step in range(4):
        with recorder.fake.on(own):
            recorder.state.write("running_mean", 10 * step + 1)
            recorder.fake.run_some()
            if step < num_updates:
                recorder.update(["weight", "bias"], 10 * step + 2)
                recorder.state.write("table", 10 * step + 3)  # after it, as a GradScaler does
        recorder.take(place)
    with recorder.fake.on(own):
        recorder.state.write("running_mean", 99)
    recorder.finish()


@PLACES
@pytest.mark.parametrize("seed", SEEDS)
def test_updates_on_several_streams_are_in_the_snapshot(place: SnapshotPlace, seed: int) -> None:
    recorder = with_all(seed)
    fake = recorder.fake
    streams = [fake.users_stream() for _ in range(2)]
    activations = fake.tensor(torch.ones(1))
    for step in range(3):
        for stream, name in zip(streams, ("weight", "bias"), strict=True):
            with fake.on(stream):
                for _ in range(8 if name == "weight" else 0):  # the latest is done first
                    fake.training_writes(activations, step)
                recorder.update([name], step)
        recorder.take(place)
        fake.run_some()
    recorder.finish()


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


def write(recorder: Recorder, value: float, *, stream: FakeStream) -> None:
    """The weight of the state, on another stream than the current one."""
    weight = recorder.state.tensors["weight"]
    recorder.fake.training_writes(weight, value, stream=stream)
    recorder.state._values["weight"] = torch.full_like(weight, value)
