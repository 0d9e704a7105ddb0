"""The engine follows the state: chosen at the first boundary, and again when it moves."""

from __future__ import annotations

import torch

from checkfreq.config import CFConfig
from checkfreq.snapshot.arena import Arena
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import HostEngine, SnapshotEngine
from checkfreq.snapshot.snapshotter import Snapshotter, engine_for
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import FileSpec
from tests.snapshot.fake_device import FakeDevice, Scripted


class NoListener:
    def forget_slots(self) -> None:
        pass

    def share_slot(self, slot: int, *, fd: int, num_bytes: int) -> None: ...
    def lay_out_slot(self, slot: int, files: tuple[FileSpec, ...]) -> None: ...


def snapshotter(*engines: SnapshotEngine) -> tuple[Snapshotter, list[SnapshotEngine]]:
    left = list(engines)
    config = CFConfig(host_memory_limit=1 << 30)
    made = Snapshotter(
        choose_engine=lambda: left.pop(0),
        arena=Arena(config=config),
        listener=NoListener(),
        config=config,
    )
    return made, left


def test_a_state_in_host_memory_gets_the_host_engine() -> None:
    assert isinstance(engine_for(CFCheckpoint(model=torch.nn.Linear(2, 2))), HostEngine)


def test_no_engine_is_chosen_before_the_first_boundary() -> None:
    made, left = snapshotter(HostEngine())
    assert made.fence() == 0.0
    assert made.device_wait_s == 0.0
    made.close()
    assert len(left) == 1
    assert made.engine.fence_on_device is False
    assert left == []
    made.close()


def test_a_state_that_moves_to_a_device_gets_the_device_engine() -> None:
    device_engine = DeviceEngine(FakeDevice(Scripted()))
    made, left = snapshotter(HostEngine(), device_engine)
    model = torch.nn.Linear(2, 2)
    chk = CFCheckpoint(model=model, rng=False)
    made.make_room(capture(chk))
    assert len(left) == 1
    model.weight = torch.nn.Parameter(torch.ones(2, 2))
    captured = capture(chk)
    moved = [ref._replace(tensor=ref.tensor.to("meta")) for ref in captured.tensors]
    captured.tensors[:] = moved  # as near to a device as this machine comes
    made.make_room(captured)
    assert left == []
    assert made.engine.fence_on_device
    assert made.device_bytes == {torch.device("meta"): 24}
    made.close()
    assert device_engine.spare_bytes(torch.device("meta")) is not None, "it was looked at"
