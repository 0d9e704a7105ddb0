"""What the policy is told of device memory: the helper thread's latest answer, for all devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from checkfreq.run.pipeline import Pipeline
from checkfreq.snapshot.device_copier import Limits
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.types import SnapshotPlace
from tests.snapshot.fake_allocator import FakeAllocator
from tests.snapshot.fake_device import FakeDevice, Scripted

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture(params=[None, SnapshotPlace.DEVICE])
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pipeline]:
    """A run whose state, of 1000 bytes, lies on two devices."""
    chk = CFCheckpoint(d={"x": torch.ones(250)}, rng=False)
    config = CFConfig(snapshot_place=request.param)
    with CFManager(tmp_path / "chk", chk, mode=CFMode.AUTO, config=config) as manager:
        manager.step()
        yield manager._session.pipeline


def test_the_fullest_device_decides_and_the_training_thread_asks_no_driver(
    pipeline: Pipeline,
) -> None:
    fake = FakeDevice(Scripted())
    fake._memories = {DEVICES[0]: FakeAllocator(5000), DEVICES[1]: FakeAllocator(900)}
    engine = DeviceEngine(fake, helper=fake.helper, limits=Limits(reserve_bytes=100))
    snapshotter = pipeline._snapshotter
    host_engine, snapshotter._chosen = snapshotter._chosen, engine
    snapshotter.device_bytes, before = dict.fromkeys(DEVICES, 500), snapshotter.device_bytes
    try:
        assert pipeline._device_room() is None, "nothing is known yet"
        engine.look_at(DEVICES)
        fake.run_all()  # FakeDevice refuses the driver to the training thread
        found = pipeline._device_room()
    finally:
        snapshotter._chosen, snapshotter.device_bytes = host_engine, before
        engine.close()
    spare_there = 900 - 100
    is_chosen_by_hand = pipeline._config.snapshot_place is not None
    assert found == (None if is_chosen_by_hand else pipeline.state_bytes + spare_there - 500)
