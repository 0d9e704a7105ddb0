"""A slot that holds the frozen tensors keeps them; any sign of a write has them copied again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import Copy, HostEngine
from checkfreq.snapshot.frozen import FrozenState
from checkfreq.snapshot.layout import StateLayout
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import ContentId
from tests.snapshot.fake_device import FakeDevice, Scripted
from tests.snapshot.recorder import row_major_bytes
from tests.snapshot.test_snapshotter import Shots
from tests.state.test_frozen import Adapted

_FULL = 4
FILE = "model.frozen.safetensors"


class FrozenShots(Shots):
    """Snapshots of a model with a frozen base; each is compared with it, byte for byte."""

    def __init__(self, *, full_copy_every: int = _FULL, **options: Any) -> None:
        self.model = Adapted()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        chk = CFCheckpoint(model=self.model, optimizer=optimizer, rng=False)
        super().__init__(chk, full_copy_every=full_copy_every, **options)
        self.attempts = 0
        self._known: dict[ContentId, dict[str, bytes]] = {}

    def take(self, *, after_update: bool = True) -> tuple[bool, ContentId]:
        """Whether the frozen tensors were copied, and what their file holds."""
        if after_update:
            self.update()
        self.snapshotter.evidence.pass_boundary(self.attempts)
        captured, snapshot = self.snapshot()
        layout = self.snapshotter._layout
        assert layout is not None
        for ref, (offset, num_bytes) in zip(captured.tensors, layout.destinations, strict=True):
            found = snapshot.slot.memory[offset : offset + num_bytes]
            assert found == row_major_bytes(ref.tensor), ref.key
        content = snapshot.slot.contents.get(FILE, ("", 0))
        parameters = self.model.named_parameters()
        frozen = {name: row_major_bytes(p) for name, p in parameters if not p.requires_grad}
        assert self._known.setdefault(content, frozen) == frozen or content == ("", 0)
        return "model.base.weight" in {copy.name for copy in snapshot.copies}, content

    def update(self) -> None:
        with torch.no_grad():
            for parameter in (self.model.down.weight, self.model.up.weight):
                parameter += 1.0
        self.attempts += 1


def beside_a_device() -> DeviceEngine:
    return DeviceEngine(FakeDevice(Scripted()))


@pytest.fixture(params=["alone", "beside a device"])
def shots(request: pytest.FixtureRequest) -> Iterator[FrozenShots]:
    is_alone = request.param == "alone"
    made = FrozenShots(engine=HostEngine if is_alone else beside_a_device)
    yield made
    made.close()


def test_each_slot_gets_the_frozen_tensors_once_and_after_so_many_snapshots_again(
    shots: FrozenShots,
) -> None:
    copied, contents = zip(*(shots.take() for _ in range(2 * _FULL + 1)), strict=True)
    both_slots = [True, True, False, False]
    assert [*copied] == [*both_slots, *both_slots, True]
    series, numbers = zip(*contents, strict=True)
    assert len({*series}) == 1
    assert numbers == (*[0] * _FULL, *[1] * _FULL, 2)


def _add(model: Adapted) -> None:
    with torch.no_grad():
        model.base.bias.add_(1.0)


def _replace(model: Adapted) -> None:
    model.base.weight = nn.Parameter(model.base.weight.detach() + 1.0, requires_grad=False)


def _replace_where_it_was(model: Adapted) -> None:
    """The allocator gives the memory out again."""
    shape = model.base.weight.shape
    del model.base.weight
    model.base.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
    with torch.no_grad():
        model.base.weight.normal_()


def _point_elsewhere(model: Adapted) -> None:
    model.base.weight.data = model.base.weight.detach() * 2.0


def _write_through_numpy(model: Adapted) -> None:
    model.base.weight.detach().numpy()[...] += 1.0


def _write_through_data(model: Adapted) -> None:
    model.base.weight.data.mul_(3.0)


def _add_a_layer(model: Adapted) -> None:
    model.more = nn.Linear(600, 600).requires_grad_(False)


WRITES = [
    _add,
    _replace,
    _replace_where_it_was,
    _point_elsewhere,
    _write_through_numpy,
    _write_through_data,
    _add_a_layer,
    lambda model: model.base.requires_grad_(not model.base.weight.requires_grad),
]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_every_slot_holds_the_state_of_its_boundary(seed: int) -> None:
    """And no two contents have the same name."""
    chance = random.Random(seed)
    shots = FrozenShots(full_copy_every=chance.choice([1, 2, 5]))
    for step in range(25):
        if chance.random() < 0.3:
            chance.choice(WRITES)(shots.model)
        if chance.random() < 0.05:
            shots.snapshotter.forget()  # as after a restore
        shots.take(after_update=step < 15 or chance.random() < 0.8)
    shots.close()


def test_nothing_is_believed_of_a_slot_whose_snapshot_failed(shots: FrozenShots) -> None:
    (_, content), *_ = [shots.take() for _ in range(3)]
    for slot in shots.arena.slots:
        shots.snapshotter._frozen.ended(slot, complete=False)
    assert shots.take() == (True, content)


def test_nothing_is_believed_of_tensors_on_a_device(shots: FrozenShots) -> None:
    shots.take()
    captured, slot = capture(shots.chk), shots.arena.acquire()
    frozen = FrozenState(full_copy_every=4)
    assert slot is not None
    layout = StateLayout.plan(captured)
    both = zip(captured.tensors, layout.destinations, strict=True)
    copies = [Copy(ref.key, ref.tensor.to("meta"), *place, True) for ref, place in both]
    found = []
    for _ in range(2):
        assert frozen.begin(copies, layout, slot, can_tell=True) == frozenset()
        frozen.ended(slot, complete=True)
        found.append(slot.contents[FILE])
    assert found[0] != found[1]
