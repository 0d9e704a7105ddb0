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

    def refuse(self, num_bytes: int) -> None:
        """Have a buffer refused for what training holds, and all of that given back."""
        piece = self.memory.allocate(1000 - num_bytes)
        self.look()
        assert not self.room.grants(num_bytes)
        self.memory.release(piece)
        self.memory.flush()
        self.memory.reset_peaks()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_nothing_is_known_before_the_first_look_or_of_a_driver_that_cannot_tell(
    watched: Watched,
) -> None:
    for _ in range(2):
        assert not watched.room.has(1)
        assert not watched.room.grants(1)
        assert watched.room.spare_bytes(0) is None
        watched.fake.free_bytes = lambda device: None  # type: ignore[method-assign]
        watched.look()


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


def test_what_was_reserved_since_the_look_is_no_room(watched: Watched) -> None:
    watched.memory.taken = 300
    watched.look()
    watched.memory.allocate(600)
    assert watched.room.has(100)
    assert not watched.room.has(101)
    watched.memory.limit = 650
    assert not watched.room.has(51)


@pytest.mark.parametrize("wanted", [150, 450, 900, 901])
def test_what_it_has_never_makes_the_allocator_flush(watched: Watched, wanted: int) -> None:
    cached = [watched.memory.allocate(150) for _ in range(3)]
    watched.memory.release(cached[1])
    watched.look()
    if watched.room.has(wanted):
        watched.memory.allocate(wanted)
    assert watched.memory.flushes == 0


def test_a_refusal_is_remembered_and_said_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.refuse(400)
    assert not watched.room.grants(400), "not asked again before a look"
    assert watched.room.spare_bytes(0) == 0
    assert ["no room for a snapshot" in record.message for record in caplog.records] == [True]


def test_a_smaller_buffer_may_fit_where_a_larger_one_was_refused(watched: Watched) -> None:
    watched.memory.allocate(600)
    watched.look()
    assert not watched.room.grants(400)
    assert watched.room.grants(300)


def test_a_refused_buffer_is_granted_once_there_is_ample_room(watched: Watched) -> None:
    watched.refuse(400)
    watched.memory.taken = 450  # room for it and the reserve, but not for the reserve twice over
    watched.look()
    assert not watched.room.grants(400)
    watched.memory.taken = 400
    watched.look()
    assert watched.room.grants(400)


def test_a_buffer_after_which_training_ran_short_is_the_last(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.memory.flush()  # before the grant: does not count
    watched.look()
    assert watched.room.grants(400)
    buffer = watched.memory.allocate(400)
    assert not watched.room.has_run_short()
    with pytest.raises(torch.OutOfMemoryError):
        watched.memory.allocate(700)
    assert watched.room.has_run_short()
    watched.memory.release(buffer)
    watched.memory.flush()
    watched.look()
    assert not watched.room.grants(1)
    assert watched.room.spare_bytes(0) == 0
    assert "training needs the device memory" in caplog.text


def test_a_device_where_less_than_the_reserve_is_left_is_short(watched: Watched) -> None:
    watched.look()
    assert watched.room.grants(400)
    watched.memory.allocate(400)
    watched.look()
    assert not watched.room.is_short()
    watched.memory.taken = 501
    watched.look()
    assert watched.room.is_short()
