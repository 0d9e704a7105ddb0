"""A training state on the fake device, and snapshots of it that are checked as they complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from checkfreq.config import CFConfig
from checkfreq.snapshot.arena import Arena, Pinner, Slot
from checkfreq.snapshot.backends import UpdateStreams
from checkfreq.snapshot.device_copier import Limits
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import Copy
from checkfreq.types import SnapshotPlace
from tests.snapshot.fake_device import FakeDevice

#: So small that a few bytes meet every limit.
TINY = Limits(
    small_bytes=8,
    staging_bytes=24,
    transpose_bytes=16,
    chunk_bytes=16,
    reserve_bytes=0,
    at_once_bytes=8,
)
WITHIN_S = 120.0
PLACES = pytest.mark.parametrize("place", list(SnapshotPlace))


@dataclass
class State:
    """Tensors, their values by the program order of training, and their places in a slot."""

    fake: FakeDevice
    tensors: dict[str, Tensor] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    is_watched: bool = False

    def add(
        self, name: str, values: Tensor, *, settled: bool = False, index: int | None = 0
    ) -> None:
        """``index``: of the device; None for a host tensor."""
        self.put(name, values if index is None else self.fake.tensor(values, index))
        if settled:
            self.settled.add(name)

    def put(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor
        self._values = {**getattr(self, "_values", {}), name: tensor.clone()}

    def write(self, name: str, value: float) -> None:
        """Training fills a tensor: queued on a device, at once on the host."""
        if self.fake.owner(self.tensors[name]) is None:
            self.tensors[name].fill_(value)
        else:
            self.fake.training_writes(self.tensors[name], value)
        self._values[name] = torch.full_like(self._values[name], value)

    def copies(self) -> list[Copy]:
        copies, offset = [], 4096
        by_size = sorted(self.tensors.items(), key=lambda item: -item[1].element_size())
        for name, tensor in by_size:
            num_bytes = tensor.numel() * tensor.element_size()
            is_settled = name in self.settled
            is_watched = is_settled and self.is_watched
            copies.append(Copy(name, tensor, offset, num_bytes, is_settled, is_watched))
            offset += num_bytes
        return copies

    def image(self) -> dict[str, bytes]:
        """The bytes that a snapshot taken now must have."""
        return {name: row_major_bytes(value) for name, value in self._values.items()}


def row_major_bytes(tensor: Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.detach().view(torch.uint8).numpy().tobytes()


class Recorder:
    """Takes snapshots and checks each slot at the instant it is reported complete."""

    def __init__(
        self,
        fake: FakeDevice,
        state: State,
        *,
        limits: Limits = TINY,
        pinner: Pinner | None = None,
        state_bytes: int = 8 << 10,
    ) -> None:
        self.fake, self.state = fake, state
        self.streams = UpdateStreams({"cuda": fake})
        self.engine = DeviceEngine(fake, limits=limits, helper=fake.helper, streams=self.streams)
        self.arena = Arena(config=CFConfig(host_memory_limit=1 << 30), pinner=pinner)
        self.arena.allocate(state_bytes)
        for slot in self.arena.slots:
            self._fill(slot)
        self.reports: list[BaseException | None] = []
        self.num_taken = 0
        self._looked_at: set[torch.device] = set()

    def take(self, place: SnapshotPlace = SnapshotPlace.HOST) -> None:
        """A snapshot, if there is a free slot."""
        slot = self.arena.acquire()
        if slot is None:
            return
        self._check_free(slot)
        self.look()
        self.num_taken += 1
        copies, expected = self.state.copies(), self.state.image()
        places = [(copy.name, copy.offset, copy.num_bytes) for copy in copies]

        def on_copied(error: BaseException | None) -> None:
            self.reports.append(error)
            if error is None:
                for name, offset, num_bytes in places:
                    assert slot.memory[offset : offset + num_bytes] == expected[name], name
            self._fill(slot)  # persisted, or void, and given to others
            self.arena.release(slot)

        self.engine.place = place
        self.engine.start(copies, slot, on_copied=on_copied)

    def look(self) -> None:
        """Find out what is free on devices that are new, as a new layout does."""
        if self.fake.capturing:
            return
        owners = {self.fake.owner(tensor) for tensor in self.state.tensors.values()}
        if new := {device for device in owners if device is not None} - self._looked_at:
            self._looked_at |= new
            self.engine.look_at(new)
            self.fake.helper.run_newest(len(new))

    def update(self, names: Sequence[str], value: float) -> None:
        """A weight update behind the fence; the host waits for host tensors only."""
        if not self.fake.capturing:
            self.streams.note()
        on_host = [n for n in self.state.settled if self.fake.owner(self.state.tensors[n]) is None]
        waited_s = self.engine.fence(timeout_s=WITHIN_S if on_host else 0.0)
        assert on_host or waited_s == 0.0
        for name in names:
            self.state.write(name, value)

    def finish(self, *, errors: int = 0) -> None:
        self.fake.run_all()
        self.engine.close()
        assert self.engine.wait_copied(timeout_s=0.0)
        assert len(self.reports) == self.num_taken, "on_copied is called once per snapshot"
        assert sum(error is not None for error in self.reports) == errors
        for slot in self.arena.slots:
            self._check_free(slot)
        self.arena.close()

    def _fill(self, slot: Slot) -> None:
        slot.memory[:] = b"\xdd" * len(slot.memory)

    def _check_free(self, slot: Slot) -> None:
        assert slot.memory[:] == b"\xdd" * len(slot.memory), "a copy into a slot given up"


def small_state(fake: FakeDevice) -> State:
    """One tensor for each way of copying, and one on the host."""
    volatile = {"running_mean": torch.arange(2.0), "table": torch.arange(4.0)}
    state = state_of(
        fake, settled={"weight": torch.arange(6.0), "bias": torch.arange(1.0)}, volatile=volatile
    )
    state.put("step", torch.tensor(3.0))
    return state


def state_of(
    fake: FakeDevice,
    *,
    settled: Mapping[str, Tensor] = MappingProxyType({}),
    volatile: Mapping[str, Tensor] = MappingProxyType({}),
    watched: bool = False,
) -> State:
    """A state on the first device."""
    state = State(fake, is_watched=watched)
    for is_settled, tensors in ((True, settled), (False, volatile)):
        for name, values in tensors.items():
            state.add(name, values, settled=is_settled)
    return state
