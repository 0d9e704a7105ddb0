"""A graph may be captured while snapshots are under way: nothing of ours breaks the capture."""

from __future__ import annotations

import threading

import pytest
import torch

from checkfreq.config import CFConfig
from checkfreq.errors import StateError
from checkfreq.snapshot.arena import Arena
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.pinning import DevicePinner
from tests.snapshot.fake_device import FakeDevice, Scripted
from tests.snapshot.recorder import Recorder, small_state

WITHIN_S = 120.0
#: Above what the arena prepares in the calling thread.
LARGE_BYTES = 24 << 20


def test_a_fence_in_a_capture_is_left_out(fake: FakeDevice, recorder: Recorder) -> None:
    recorder.take()
    fake.begin_capture()
    recorder.update([], 0)
    fake.end_capture()
    recorder.update(["weight"], 9)
    recorder.finish()


def test_waits_are_not_measured_in_a_capture(fake: FakeDevice, recorder: Recorder) -> None:
    recorder.take()
    recorder.update(["weight"], 9)
    fake.begin_capture()
    fake.run_all()
    assert recorder.engine.device_wait_s == 0.0
    fake.end_capture()
    assert recorder.engine.device_wait_s > 0.0
    recorder.finish()


def test_a_boundary_in_a_capture_is_refused(fake: FakeDevice, recorder: Recorder) -> None:
    fake.begin_capture()
    recorder.take()
    fake.end_capture()
    (error,) = recorder.reports
    assert isinstance(error, StateError)
    recorder.finish(errors=1)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_snapshot_may_end_in_a_capture(fake: FakeDevice, recorder: Recorder, mode: str) -> None:
    recorder.take()
    fake.begin_capture(mode=mode)
    fake.run_all()
    fake.end_capture()
    recorder.finish()
    assert recorder.reports == [None]


class Held(FakeDevice):
    """Its events happen when the test allows."""

    def __init__(self) -> None:
        super().__init__(Scripted())
        self.may_happen = threading.Event()

    def synchronize(self, event: object) -> None:
        assert self.may_happen.wait(WITHIN_S)
        super().synchronize(event)  # type: ignore[arg-type]


def test_the_helper_thread_waits_for_events_in_a_capture() -> None:
    fake = Held()
    state = small_state(fake)
    arena = Arena(config=CFConfig(host_memory_limit=1 << 30))
    arena.allocate(64 << 10)
    slot = arena.acquire()
    assert slot is not None
    engine = DeviceEngine(fake)
    reports: list[BaseException | None] = []
    engine.start(state.copies(), slot, on_copied=reports.append)
    fake.begin_capture()
    fake.may_happen.set()
    assert engine.wait_copied(timeout_s=WITHIN_S)
    fake.end_capture()
    engine.close()
    arena.close()
    assert reports == [None]


@pytest.mark.parametrize("num_bytes", [4096, LARGE_BYTES], ids=["inline", "in the background"])
def test_memory_is_pinned_in_a_capture(fake: FakeDevice, num_bytes: int) -> None:
    config = CFConfig(host_memory_limit=1 << 30, num_slots=1)
    arena = Arena(config=config, pinner=DevicePinner(fake))
    fake.begin_capture()
    arena.allocate(num_bytes)
    assert arena.wait_ready(timeout_s=WITHIN_S)
    fake.end_capture()
    assert fake.registrations.num_bytes
    arena.close()


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_this_device_breaks_a_capture_as_cuda_does(fake: FakeDevice, mode: str) -> None:
    event = fake.record(fake.current_stream(torch.device("cuda", 0)))
    errors: list[BaseException] = []

    def query() -> None:
        try:
            fake.is_done(event)
        except RuntimeError as error:
            errors.append(error)

    fake.begin_capture(mode=mode)
    thread = threading.Thread(target=query)
    thread.start()
    thread.join()
    if mode == "global":
        with pytest.raises(AssertionError, match="query broke the capture"):
            fake.end_capture()
    else:
        fake.end_capture()
    assert len(errors) == (mode == "global")
