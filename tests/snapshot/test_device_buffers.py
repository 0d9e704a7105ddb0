"""Device memory of snapshots: none that training misses, none for which the allocator flushes."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

from checkfreq.snapshot.device_engine import HelperThread
from checkfreq.types import SnapshotPlace
from tests.snapshot.fake_device import FakeDevice, Seeded
from tests.snapshot.recorder import TINY, WITHIN_S, Recorder, State, small_state
from tests.snapshot.test_device_engine import random_values

CUDA = torch.device("cuda", 0)


def take_to_device(recorder: Recorder, times: int = 1) -> None:
    """Snapshots to a buffer on the device, each complete."""
    for _ in range(times):
        recorder.take(SnapshotPlace.DEVICE)
        recorder.fake.run_all()


def test_an_allocation_that_fails_all_the_same_is_the_last_for_a_device_snapshot(
    fake: FakeDevice, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.state.add("large", torch.ones(500), settled=True)
    recorder.look()
    fake.memory().taken = fake.memory().free - 500  # others took the rest since the look
    take_to_device(recorder, times=2)
    recorder.finish()
    assert fake.memory().ooms == 1
    assert "training needs the device memory" in caplog.text
    assert recorder.engine.spare_bytes(CUDA) == 0


def test_the_first_device_snapshot_goes_to_the_host_while_nothing_is_known(
    fake: FakeDevice, recorder: Recorder
) -> None:
    recorder.look = lambda: None  # type: ignore[method-assign]
    before = fake.num_allocated
    recorder.take(SnapshotPlace.DEVICE)
    assert fake.num_allocated == before
    fake.run_all()  # and looks
    recorder.take(SnapshotPlace.DEVICE)
    assert fake.num_allocated > before
    recorder.finish()
    assert fake.num_allocated == before, "a closed engine holds no buffer"
    assert [stream.index for stream in fake.returned] == [CUDA], "and no stream"


@pytest.mark.parametrize("seed", range(50))
def test_no_snapshot_ever_makes_the_allocator_flush(seed: int) -> None:
    fake, draw = FakeDevice(Seeded(seed)), random.Random(seed)
    state = State(fake)
    for number in range(draw.randrange(3, 9)):
        state.add(f"t{number}", random_values(draw), settled=draw.random() < 0.5)
    state.add("large", torch.arange(64.0).reshape(8, 8).t(), settled=True)
    limits = replace(TINY, small_bytes=16, staging_bytes=draw.choice([32, 256]))
    recorder = Recorder(fake, state, limits=replace(limits, reserve_bytes=draw.randrange(50)))
    memory = fake.memory()
    for step in range(6):
        if draw.random() < 0.5:
            state.add(f"more{step}", random_values(draw), settled=True)
        memory.release(memory.allocate(draw.randrange(1, 400)))  # activations, cached from now on
        if draw.random() < 0.5:
            memory.free = draw.randrange(600)  # others take the rest
            recorder.engine.look_at([CUDA])
            fake.helper.run_newest(1)
        memory.release(memory.allocate(draw.randrange(1 + memory.free)))  # and training more
        before = (memory.flushes, memory.ooms)
        recorder.update(sorted(state.settled), step % 2)
        recorder.take(draw.choice(list(SnapshotPlace)))
        assert (memory.flushes, memory.ooms) == before
        memory.free = 1000  # training itself never runs short here
        fake.run_some()
    recorder.finish()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_known", [True, False], ids=["", "since the look"])
def test_without_room_for_staging_tensors_are_copied_one_by_one(seed: int, is_known: bool) -> None:
    fake = FakeDevice(Seeded(seed))
    state = small_state(fake)
    for number, values in enumerate([torch.arange(64.0).reshape(8, 8).t(), torch.ones(3, 3).t()]):
        state.add(f"strided{number}", values, settled=number == 0)
    state.put("conj", fake.tensor(torch.tensor([1 + 2j, 3 - 4j])).conj())
    state.settled.add("conj")
    recorder = Recorder(fake, state)
    if not is_known:
        recorder.look()
    fake.memory().free = 0
    before = fake.num_allocated
    for step in range(3):
        recorder.take()
        assert fake.num_packs == 0
        assert fake.num_allocated == before
        state.write("running_mean", step)
        recorder.update(["weight", "bias", "strided0"], step)
    recorder.finish()
    assert (fake.memory().ooms > 0) is not is_known


def test_the_device_buffer_is_given_back_under_memory_pressure(fake: FakeDevice) -> None:
    recorder = Recorder(fake, small_state(fake), limits=replace(TINY, reserve_bytes=1000))
    before = fake.num_allocated
    take_to_device(recorder)
    assert fake.num_allocated > before, "kept for the next snapshot"
    recorder.take(SnapshotPlace.DEVICE)
    fake.memory().free = 999
    fake.run_all()
    assert fake.num_allocated == before
    recorder.finish()


@pytest.mark.parametrize("is_caught_in_between", [True, False])
def test_the_device_buffer_is_given_back_when_training_runs_short(
    is_caught_in_between: bool, fake: FakeDevice, recorder: Recorder
) -> None:
    before = fake.num_allocated
    take_to_device(recorder)
    assert recorder.engine._watch(), "memory is held that training may need"
    memory = fake.memory()
    wanted = memory.free + fake.num_allocated - before - 8
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(wanted)
    if is_caught_in_between:
        assert not recorder.engine._watch()
    else:  # by the end of the next snapshot
        take_to_device(recorder)
    assert fake.num_allocated == before
    memory.release(memory.allocate(wanted))
    recorder.take(SnapshotPlace.DEVICE)
    assert fake.num_allocated == before, "from now on it goes to the host"
    recorder.finish()


def test_the_helper_thread_watches_between_tasks_until_there_is_nothing_to_watch() -> None:
    """A task or a watch that fails does not end it."""
    calls, left = threading.Semaphore(0), list[bool]()

    def watch() -> bool:
        calls.release()
        return left.pop(0)  # of none left: an error

    thread = HelperThread(prepare=lambda: None, watch=watch, watch_every_s=0.001)
    for answers in ([True, True, False], [], [False]):
        left[:] = answers
        done = threading.Event()
        thread.submit(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        thread.submit(done.set)
        assert done.wait(WITHIN_S)
        for _ in answers or [None]:
            assert calls.acquire(timeout=WITHIN_S)
    assert thread.close(timeout_s=WITHIN_S)


def test_a_device_that_cannot_be_looked_at_gives_no_room_and_fails_no_snapshot(
    fake: FakeDevice, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(device: torch.device) -> int:
        raise RuntimeError("unspecified launch failure")

    fake.free_bytes = broken  # type: ignore[method-assign]
    for step in range(3):
        take_to_device(recorder)
        recorder.update(["weight"], step)
    recorder.finish()
    assert recorder.engine.spare_bytes(CUDA) is None
    assert fake.num_packs > 0, "small tensors are packed all the same"
    (said,) = caplog.messages
    assert "cuda:0: cannot tell how much memory is free: unspecified" in said
