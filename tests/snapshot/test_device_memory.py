"""Room for snapshots in device memory: what training will not miss, and never a flush for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from checkfreq.snapshot.device_memory import DeviceRoom
from tests.snapshot.fake_allocator import FakeAllocator
from tests.snapshot.fake_device import FakeDevice, Scripted

CUDA = torch.device("cuda", 0)


class Watched:
    """The room of a device of 1000 bytes, of which 100 must stay free."""

    def __init__(self) -> None:
        self.fake = FakeDevice(Scripted())
        self.memory = self.fake._memories[CUDA] = FakeAllocator(1000)
        self.room = DeviceRoom(self.fake, CUDA, reserve_bytes=100)

    def look(self) -> None:
        self.fake.helper.submit(self.room.look)
        self.fake.helper.close(timeout_s=0)


@pytest.fixture
def watched() -> Watched:
    return Watched()


def fragments(memory: FakeAllocator) -> None:
    memory.release(memory.allocate(900))
    memory.allocate(450)  # the rest is a fragment


def gives_back(memory: FakeAllocator) -> None:
    memory.release(memory.allocate(700))
    memory.flush()  # torch.cuda.empty_cache() at the end of each iteration


def is_taken(memory: FakeAllocator) -> None:
    memory.taken = 300
    memory.allocate(200)


def is_limited(memory: FakeAllocator) -> None:
    memory.limit = 500
    memory.allocate(200)


@pytest.mark.parametrize(
    ("use", "room", "spare"),
    [(is_taken, 500, 400), (fragments, 100, 0), (gives_back, 300, 200), (is_limited, 300, 200)],
)
def test_room_is_what_the_driver_and_the_limit_can_still_give(
    watched: Watched, use: Callable[[FakeAllocator], None], room: int, spare: int
) -> None:
    use(watched.memory)
    watched.look()
    assert watched.room.has(room)
    assert not watched.room.has(room + 1)
    assert watched.room.spare_bytes(0) == spare
    assert watched.room.spare_bytes(500) == spare + 500, "a buffer that is held is used again"
    if spare:
        assert watched.room.grants(spare)
    assert not watched.room.grants(spare + 1)


def test_a_refused_buffer_is_granted_once_there_is_ample_room(watched: Watched) -> None:
    watched.memory.taken = 600
    watched.look()
    assert not watched.room.grants(400)
    assert watched.room.grants(300), "a smaller one may fit"
    watched.memory.taken = 450  # room for it and the reserve, but not for the reserve twice over
    watched.look()
    assert not watched.room.grants(400)
    watched.memory.taken = 400
    watched.look()
    assert watched.room.grants(400)
