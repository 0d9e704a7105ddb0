"""The limit on the upload rate, by a clock that only pauses move."""

from __future__ import annotations

from pathlib import Path

from checkfreq.mirror.bandwidth import Bandwidth
from checkfreq.mirror.settings import Mirror
from checkfreq.mirror.uploader import Uploader
from checkfreq.store.store import CheckpointStore
from tests.mirror.checkpoints import MIB, commit, memory_remote, noise


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_requests_wait_for_those_before_them() -> None:
    time = FakeTime()
    bandwidth = Bandwidth(1000, clock=time.clock, sleep=time.sleep)
    for _ in range(5):
        bandwidth.wait_for(500)
    assert time.now_s == 102.0


def test_time_without_requests_is_not_saved_up() -> None:
    time = FakeTime()
    bandwidth = Bandwidth(1000, clock=time.clock, sleep=time.sleep)
    time.now_s += 3600
    bandwidth.wait_for(1000)
    bandwidth.wait_for(1000)
    assert time.now_s == 3701.0


def test_without_a_limit_nothing_waits() -> None:
    time = FakeTime()
    Bandwidth(None, clock=time.clock, sleep=time.sleep).wait_for(1 << 40)
    assert time.now_s == 100.0


def test_an_upload_takes_as_long_as_the_limit_says(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    commit(store, 1, {"m.safetensors": {f"t{i}": noise(8 * MIB) for i in range(5)}})
    time = FakeTime()
    mirror = Mirror("memory:///x", max_bytes_per_s=4 * MIB)
    uploader = Uploader(
        memory_remote(mirror),
        store,
        bandwidth=Bandwidth(mirror.max_bytes_per_s, clock=time.clock, sleep=time.sleep),
        part_bytes=mirror.part_bytes,
        go_on=lambda sending: None,
    )
    uploader.upload(1)
    uploader.close()
    # Five tensors of 8 MiB at 4 MiB a second, before the last of which nothing more waits.
    assert time.now_s - 100.0 >= 8.0
