"""Host tensors beside those of a device: large settled ones are copied behind the fence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkfreq import faults
from checkfreq.errors import SnapshotError
from checkfreq.snapshot.watch import UnannouncedWrite
from checkfreq.types import SnapshotPlace
from tests.snapshot.fake_device import FakeDevice, Seeded
from tests.snapshot.recorder import PLACES, WITHIN_S, Recorder, State, small_state


def offloading(fake: FakeDevice) -> State:
    """State on a device, and some of an optimizer's on the host."""
    state = small_state(fake)
    state.add("exp_avg", torch.arange(9.0), settled=True, index=None)
    state.is_watched = True
    return state


@pytest.fixture
def offload(fake: FakeDevice) -> Iterator[Recorder]:
    recorder = Recorder(fake, offloading(fake))
    yield recorder
    recorder.engine.close()
    recorder.arena.close()


def is_in_slot(recorder: Recorder, name: str) -> bool:
    """Whether the slot that is being filled has a tensor's bytes."""
    (slot,) = (slot for slot in recorder.arena.slots if not slot.is_free)
    (copy,) = (copy for copy in recorder.state.copies() if copy.name == name)
    found = slot.memory[copy.offset : copy.offset + copy.num_bytes]
    return found == recorder.state.image()[name]


def test_an_update_waits_on_the_host_for_a_large_settled_one_which_a_thread_copies(
    offload: Recorder, held: Path
) -> None:
    offload.take()
    assert is_in_slot(offload, "step")
    assert not is_in_slot(offload, "exp_avg")
    with pytest.raises(SnapshotError, match="barrier_timeout_s"):
        offload.engine.fence(timeout_s=0.0)
    held.touch()
    offload.update(["weight", "exp_avg"], 9)
    offload.finish()


@PLACES
@pytest.mark.parametrize("seed", range(15))
def test_training_never_leaks_into_a_snapshot(place: SnapshotPlace, seed: int) -> None:
    fake = FakeDevice(Seeded(seed))
    recorder = Recorder(fake, offloading(fake))
    for step in range(4):
        recorder.state.write("running_mean", 10 * step + 1)
        fake.run_some()
        recorder.update(["weight", "bias", "exp_avg"], 10 * step + 2)
        recorder.state.write("step", 10 * step + 3)
        recorder.take(place)  # the device may still be copying for the one before
        recorder.state.write("step", 10 * step + 4)
    recorder.finish()


def test_a_snapshot_ends_when_both_halves_have(
    fake: FakeDevice, offload: Recorder, held: Path
) -> None:
    fake.helper.submit(held.touch)  # the helper comes to the snapshot before its thread does
    offload.take()
    fake.run_streams()
    assert not offload.engine.wait_copied(timeout_s=0.0)
    fake.run_all()
    assert offload.reports == [None]
    assert offload.engine.wait_copied(timeout_s=0.0)
    offload.finish()


def test_a_write_that_asks_no_fence_voids_the_snapshot(offload: Recorder, held: Path) -> None:
    offload.take()
    offload.state.tensors["exp_avg"].numpy()[...] = 7
    held.touch()
    offload.finish(errors=1)
    (error,) = offload.reports
    assert isinstance(error, UnannouncedWrite)
    assert "copied: exp_avg. Expected" in str(error)


@pytest.mark.parametrize(
    "script",
    [
        "snapshot.copy_settled:raise-EIO",  # the thread's first
        "snapshot.copy_end:raise-EIO",
        "snapshot.copy_end:raise-EIO:2",  # then the helper's
    ],
)
def test_an_error_in_either_half_is_reported_once(
    offload: Recorder, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKFREQ_FAULT", script)
    monkeypatch.setattr(faults, "_script", faults._Script())
    offload.take()
    offload.fake.run_all()
    offload.update(["weight", "exp_avg"], 9)
    offload.take()
    offload.finish(errors=1)


def test_in_a_capture_an_update_waits_for_host_tensors_and_nothing_is_left_to_a_thread(
    fake: FakeDevice, offload: Recorder
) -> None:
    offload.take()
    fake.begin_capture()
    offload.update(["exp_avg"], 9)
    offload.take()
    fake.end_capture()
    assert offload.engine.fence(timeout_s=WITHIN_S) == 0.0
    offload.finish(errors=1)
