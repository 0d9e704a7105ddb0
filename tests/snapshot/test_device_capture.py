"""A graph may be captured while snapshots are under way: nothing of ours breaks the capture."""

from __future__ import annotations

import threading

import pytest

from checkfreq.config import CFConfig
from checkfreq.errors import StateError
from checkfreq.snapshot.arena import Arena
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.pinning import DevicePinner
from tests.snapshot.fake_device import FakeDevice, Scripted
from tests.snapshot.recorder import WITHIN_S, Recorder, small_state


def test_a_fence_in_a_capture_is_left_out(fake: FakeDevice, recorder: Recorder) -> None:
    """And waits are measured once it is over."""
    recorder.take()
    recorder.update(["weight"], 9)
    fake.begin_capture()
    recorder.update([], 0)
    fake.run_all()
    assert recorder.engine.device_wait_s == 0.0
    fake.end_capture()
    assert recorder.engine.device_wait_s > 0.0
    recorder.finish()


def test_a_boundary_in_a_capture_is_refused(fake: FakeDevice, recorder: Recorder) -> None:
    recorder.take()
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
    arena = Arena(config=CFConfig(host_memory_limit=1 << 30))
    arena.allocate(64 << 10)
    slot = arena.acquire()
    assert slot is not None
    engine = DeviceEngine(fake)
    reports: list[BaseException | None] = []
    engine.start(small_state(fake).copies(), slot, on_copied=reports.append)
    fake.begin_capture()
    fake.may_happen.set()
    assert engine.wait_copied(timeout_s=WITHIN_S)
    fake.end_capture()
    engine.close()
    arena.close()
    assert reports == [None]


@pytest.mark.parametrize("num_bytes", [4096, 24 << 20], ids=["inline", "in the background"])
def test_memory_is_pinned_in_a_capture(fake: FakeDevice, num_bytes: int) -> None:
    config = CFConfig(host_memory_limit=1 << 30, num_slots=1)
    arena = Arena(config=config, pinner=DevicePinner(fake))
    fake.begin_capture()
    arena.allocate(num_bytes)
    assert arena.wait_ready(timeout_s=WITHIN_S)
    fake.end_capture()
    assert fake.registrations.num_bytes
    arena.close()
