"""What a snapshot reuses of the one before it, and what it must not reuse."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq.config import CFConfig
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import HostEngine, SnapshotEngine
from checkfreq.snapshot.snapshotter import Snapshot, Snapshotter
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState
from checkfreq.types import FileSpec
from tests.snapshot.fake_device import FakeDevice, Scripted
from tests.snapshot.recorder import WITHIN_S, row_major_bytes


class NoListener:
    def forget_slots(self) -> None: ...
    def share_slot(self, slot: int, *, fd: int, num_bytes: int) -> None: ...
    def lay_out_slot(self, slot: int, files: tuple[FileSpec, ...]) -> None: ...


class Shots:
    """Snapshots of ``chk``, one after another in the same slots."""

    def __init__(
        self,
        chk: CFCheckpoint,
        *,
        engine: Callable[[], SnapshotEngine] = HostEngine,
        **settings: Any,
    ) -> None:
        self.chk = chk
        config = CFConfig(host_memory_limit=1 << 30, **settings)
        self.arena = Arena(config=config)
        self.snapshotter = Snapshotter(
            choose_engine=engine, arena=self.arena, listener=NoListener(), config=config
        )

    def snapshot(self) -> tuple[CapturedState, Snapshot]:
        """What was captured, and one snapshot of it, complete; its slot is free again."""
        captured = capture(self.chk)
        assert self.snapshotter.make_room(captured)
        assert self.arena.wait_ready(timeout_s=WITHIN_S)
        slot = self.arena.acquire()
        assert slot is not None
        snapshot = self.snapshotter.take(captured, slot, on_copied=_raise)
        assert self.snapshotter.engine.wait_copied(timeout_s=WITHIN_S)
        slot.complete_s = time.perf_counter()
        self.arena.release(slot)
        return captured, snapshot

    def close(self) -> None:
        self.snapshotter.close()
        self.arena.close()


def shots_of(model: nn.Module, **options: Any) -> Shots:
    return Shots(CFCheckpoint(model=model, rng=False), **options)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def bytes_in_slot(snapshot: Snapshot, name: str) -> bytes:
    """The bytes that the slot has for a tensor."""
    (copy,) = (copy for copy in snapshot.copies if copy.name == name)
    slot: Slot = snapshot.slot
    return bytes(slot.memory[copy.offset : copy.offset + copy.num_bytes])


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(3, 2)


@pytest.fixture
def shots(model: nn.Linear) -> Iterator[Shots]:
    made = shots_of(model)
    yield made
    made.close()


def test_a_structure_has_its_names_and_places_whatever_tensors_it_has(
    shots: Shots, model: nn.Linear
) -> None:
    first = shots.snapshot()[1]
    model.weight = nn.Parameter(torch.full((2, 3), 5.0))
    second = shots.snapshot()[1]
    assert [copy.name for copy in first.copies] == ["model.weight", "model.bias"]
    for one, other in zip(first.copies, second.copies, strict=True):
        assert one.name is other.name
        assert one[2:] == other[2:]
        assert bytes_in_slot(second, one.name) == row_major_bytes(other.source)
    assert shots.snapshotter.num_layouts == 1
    model.register_buffer("more", torch.arange(4.0))
    changed = shots.snapshot()[1]
    assert bytes_in_slot(changed, "model.more") == row_major_bytes(torch.arange(4.0))
    assert shots.snapshotter.num_layouts == 2


def test_updates_wait_for_the_engine_from_the_first_snapshot_on() -> None:
    class Waiting(HostEngine):
        def fence(self, *, timeout_s: float) -> float:
            return 2.0

    shots = shots_of(nn.Linear(2, 2), engine=Waiting)
    assert shots.snapshotter.fence() == shots.snapshotter.device_wait_s == 0.0
    shots.snapshot()[1]
    assert shots.snapshotter.fence() == 2.0
    shots.close()


def test_a_state_that_moves_to_a_device_gets_the_device_engine(model: nn.Linear) -> None:
    device_engine = DeviceEngine(FakeDevice(Scripted()))
    left: list[SnapshotEngine] = [HostEngine(), device_engine]
    shots = shots_of(model, engine=lambda: left.pop(0))
    shots.snapshot()
    made = shots.snapshotter
    assert not made.engine.fence_on_device
    captured = capture(shots.chk)
    moved = [ref._replace(tensor=ref.tensor.to("meta")) for ref in captured.tensors]
    captured.tensors[:] = moved  # as near to a device as this machine comes
    made.make_room(captured)
    assert made.engine.fence_on_device
    assert made.device_bytes == {torch.device("meta"): 32}
    shots.close()
    assert device_engine.spare_bytes(torch.device("meta")) is not None, "it was looked at"
