"""What a lingering worker offers is taken over whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkfreq.config import CFConfig
from checkfreq.persist import frames as f
from checkfreq.persist.frames import HandoverError, Stage
from checkfreq.persist.handover import Offer
from checkfreq.persist.offer import Body
from checkfreq.persist.persistence import Persistence
from checkfreq.policy.retention import KeepLast
from checkfreq.run.inheritance import Inheritance
from checkfreq.snapshot.arena import Arena
from checkfreq.types import Role
from tests.persist.offers import body_of, changed, snapshot_in


class Connection:
    """Notes what it is told; the worker at its other end is gone."""

    def __init__(self) -> None:
        self.told: list[f.Frame] = []
        self.is_closed = False

    def send(self, frame: f.Frame, *, fds: tuple[int, ...] = ()) -> None:
        self.told.append(frame)

    def receive(self, *, most_fds: int) -> f.Frame:
        raise HandoverError("the worker closed the connection")

    def close(self) -> None:
        self.is_closed = True


class Heir:
    """A run that may take over one slot."""

    def __init__(self, chk_dir: Path, memory: int, *, role: Role = Role()) -> None:
        self.connection: Any = Connection()
        self.memory = memory
        self.arena = Arena(config=CFConfig(num_slots=1))
        self.persistence = Persistence(
            chk_dir,
            config=CFConfig(),
            retention=KeepLast(1),
            tolerate_failures=0,
            release=self.arena.release,
        )
        self.inheritance = Inheritance(chk_dir, role=role)

    def take(self, body: Body) -> bool:
        fds = {body.slots[0][0]: os.dup(self.memory)}
        self.inheritance._own = Offer(self.connection, body, fds)
        return self.inheritance.take(self.arena, self.persistence)

    def expect_nothing_taken(self) -> None:
        assert self.arena.slots == ()
        assert self.inheritance.held == ()
        assert self.persistence.num_in_flight == 0
        assert self.connection.is_closed


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("slot")
    yield fd
    os.close(fd)


@pytest.fixture
def open_fds() -> Iterator[None]:
    """No descriptor is left open."""
    before = {*os.listdir("/proc/self/fd")}
    yield
    assert {*os.listdir("/proc/self/fd")} == before


@pytest.mark.parametrize("stage", [Stage.IN_FLIGHT, Stage.DURABLE])
def test_a_worker_that_is_gone_when_it_is_to_be_taken_leaves_nothing(
    stage: Stage, memory: int, open_fds: None, tmp_path: Path
) -> None:
    heir = Heir(tmp_path, memory)
    assert not heir.take(body_of(snapshot_in(memory, stage=stage)))
    heir.expect_nothing_taken()
    assert heir.connection.told == [f.Take()]


LIES: dict[str, dict[str, Any]] = {
    "a record of another attempt": {"attempt": "another"},
    "a layout beyond the slot": {"slot_offsets": {"model.safetensors": 1 << 40}},
    "a slot of another size": {},
    "the worker of another role": {},
}


@pytest.mark.parametrize("lie", LIES)
def test_an_offer_that_lies_or_is_for_others_has_all_of_it_released(
    lie: str, memory: int, open_fds: None, tmp_path: Path
) -> None:
    role = Role(0, 2, (0, 1)) if lie == "the worker of another role" else Role()
    heir = Heir(tmp_path, memory, role=role)
    snapshot = snapshot_in(memory, stage=Stage.IN_FLIGHT)
    body = body_of(changed(snapshot, **LIES[lie]) if LIES[lie] else snapshot)
    if lie == "a slot of another size":
        os.ftruncate(memory, 4096)
    assert not heir.take(body)
    heir.expect_nothing_taken()
    assert heir.connection.told == [f.Release()]
