"""Room for snapshots in device memory: what training will not miss, and never a flush for it."""

from __future__ import annotations

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


# ---- what counts as room


def test_nothing_is_known_before_the_first_look(watched: Watched) -> None:
    assert not watched.room.has(1)
    assert not watched.room.grants(1)
    assert watched.room.spare_bytes(0) is None


def test_a_driver_that_cannot_tell_leaves_it_unknown(watched: Watched) -> None:
    watched.fake.free_bytes = lambda device: None  # type: ignore[method-assign]
    watched.look()
    assert watched.room.spare_bytes(0) is None
    assert not watched.room.grants(1)


def test_room_is_what_the_driver_can_still_give(watched: Watched) -> None:
    watched.memory.taken = 300
    watched.memory.allocate(200)
    watched.look()
    assert watched.room.has(500)
    assert not watched.room.has(501)
    assert watched.room.spare_bytes(0) == 400


def test_cached_memory_is_no_room(watched: Watched) -> None:
    watched.memory.release(watched.memory.allocate(900))
    watched.memory.allocate(450)  # the rest is a fragment
    watched.look()
    assert not watched.room.has(101)
    assert watched.room.spare_bytes(0) == 0


def test_what_an_iteration_gave_back_is_no_room(watched: Watched) -> None:
    watched.memory.release(watched.memory.allocate(700))
    watched.memory.flush()  # torch.cuda.empty_cache() at the end of each iteration
    watched.look()
    assert watched.room.has(300)
    assert not watched.room.has(301)
    assert watched.room.grants(200)
    assert not watched.room.grants(201)


def test_what_was_reserved_since_the_look_is_no_room(watched: Watched) -> None:
    watched.memory.taken = 300
    watched.look()
    watched.memory.allocate(600)
    assert watched.room.has(100)
    assert not watched.room.has(101)


def test_the_limit_of_the_process_is_respected(watched: Watched) -> None:
    watched.memory.limit = 500
    watched.memory.allocate(200)
    watched.look()
    assert watched.room.has(300)
    assert not watched.room.has(301)
    watched.memory.limit = 250
    assert not watched.room.has(51)


def test_a_buffer_that_is_held_can_be_used_again(watched: Watched) -> None:
    watched.memory.allocate(700)
    watched.look()
    assert watched.room.spare_bytes(500) == 1000 - 700 - 100 + 500


@pytest.mark.parametrize("wanted", [150, 450, 900, 901])
def test_what_it_has_never_makes_the_allocator_flush(wanted: int) -> None:
    watched = Watched()
    cached = [watched.memory.allocate(150) for _ in range(3)]
    watched.memory.release(cached[1])
    watched.look()
    if watched.room.has(wanted):
        watched.memory.allocate(wanted)
    assert watched.memory.flushes == 0


# ---- refusals


def test_a_refusal_is_remembered_and_said_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    piece = watched.memory.allocate(600)
    watched.look()
    assert not watched.room.grants(400)
    watched.memory.release(piece)
    watched.memory.flush()
    watched.memory.reset_peaks()
    assert not watched.room.grants(400), "not asked again before a look"
    assert watched.room.spare_bytes(0) == 0
    assert ["no room for a snapshot" in record.message for record in caplog.records] == [True]


def test_a_smaller_buffer_may_fit_where_a_larger_one_was_refused(watched: Watched) -> None:
    watched.memory.allocate(600)
    watched.look()
    assert not watched.room.grants(400)
    assert watched.room.grants(300)


def test_a_refused_buffer_is_granted_once_there_is_ample_room(watched: Watched) -> None:
    piece = watched.memory.allocate(600)
    watched.look()
    assert not watched.room.grants(400)
    watched.memory.taken = 0
    watched.memory.release(piece)
    watched.memory.flush()
    watched.memory.reset_peaks()
    watched.memory.taken = 450  # room for it and the reserve, but not for the reserve twice over
    watched.look()
    assert not watched.room.grants(400)
    watched.memory.taken = 400
    watched.look()
    assert watched.room.grants(400)


def test_a_buffer_after_which_training_ran_short_is_the_last(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_what_ran_short_before_the_grant_does_not_count(watched: Watched) -> None:
    watched.memory.flush()
    watched.look()
    assert watched.room.grants(400)
    assert not watched.room.has_run_short()


def test_a_device_where_less_than_the_reserve_is_left_is_short(watched: Watched) -> None:
    watched.look()
    assert watched.room.grants(400)
    watched.memory.allocate(400)
    watched.look()
    assert not watched.room.is_short()
    watched.memory.taken = 501
    watched.look()
    assert watched.room.is_short()
