"""Slots: size, limits and owners; and how much host memory is available."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkfreq import CFCheckpoint
from checkfreq.config import CFConfig
from checkfreq.errors import ConfigError
from checkfreq.snapshot.arena import Arena, Pinner, Pins
from checkfreq.snapshot.memory import available_host_bytes, cgroup_limit_bytes
from tests.contract.runs import config, managed

MIB = 1 << 20
#: Only a defect reaches it.
DEADLINE_S = 60.0


_MADE: list[Arena] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Closes what the helpers below made, once more where the test did."""
    yield
    while _MADE:
        _MADE.pop().close()


def made(pinner: Pinner | None = None, **settings: object) -> Arena:
    options = {} if pinner is None else {"pinner": pinner, "close_timeout_s": 0.05}
    _MADE.append(Arena(config=CFConfig(**settings), **options))  # type: ignore[arg-type]
    return _MADE[-1]


def arena_of(state_bytes: int, **settings: object) -> Arena:
    arena = made(**settings)
    arena.allocate(state_bytes)
    return arena


@pytest.mark.parametrize("state_bytes", [1, 20 * MIB])
def test_slots_have_room_for_the_state_and_its_slack(state_bytes: int) -> None:
    """Small ones are ready at once, large ones by a thread; every page can be written."""
    arena = arena_of(state_bytes, num_slots=3, arena_slack=0.5)
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert arena.is_ready()
    assert len(arena.slots) == 3
    assert 0 <= arena.slot_bytes - 1.5 * state_bytes < 4 * 4096
    assert arena.slot_bytes % 4096 == 0
    for slot in arena.slots:
        ctypes.memset(slot.address, 1, slot.num_bytes)


def test_a_slot_has_one_owner_at_a_time() -> None:
    arena = arena_of(100, num_slots=2)
    first, second = arena.acquire(), arena.acquire()
    assert first is not None
    assert second not in (first, None)
    assert arena.acquire() is None
    assert not arena.may_have_room()
    arena.release(first)
    assert arena.may_have_room()
    assert arena.acquire() is first


def test_a_limit_below_one_slot_is_a_config_error_that_names_the_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        arena_of(100 * MIB, host_memory_limit=50 * MIB, arena_slack=0.0)
    text = str(caught.value)
    assert "100.0 MiB of state needs a host buffer of 100.0 MiB" in text
    assert "CFConfig.host_memory_limit is 50.0 MiB" in text


def test_a_limit_below_all_slots_leaves_fewer_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        arena = arena_of(10 * MIB, num_slots=4, host_memory_limit=25 * MIB)
    assert len(arena.slots) == 2
    assert "using 2 snapshot slot(s) of 10.5 MiB instead of 4" in caplog.text


def test_the_newest_complete_snapshot_is_overwritten_last() -> None:
    arena = arena_of(100, num_slots=3)
    for complete_s in (2.0, 3.0, None):  # the last was given up: it holds no snapshot
        slot = arena.acquire()
        assert slot is not None
        slot.complete_s = complete_s
    for slot in arena.slots:
        arena.release(slot)

    taken = [arena.acquire() for _ in range(3)]

    assert [slot.index for slot in taken if slot] == [2, 0, 1]
    assert {slot.complete_s for slot in taken if slot} == {None}


def test_slots_of_an_earlier_process_are_taken_over_with_what_they_hold() -> None:
    before = arena_of(10 * MIB, num_slots=3)
    before.slots[1].memory[5:8] = b"abc"
    arena = made(num_slots=3)
    arena.adopt(before.slots, held={0}, newest=1)
    before.close()

    assert not arena.is_ready()
    arena.fault_in()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert arena.fits(10 * MIB)
    assert not arena.fits(arena.slot_bytes + 1)
    taken = [arena.acquire() for _ in range(3)]
    assert [slot and slot.index for slot in taken] == [2, 1, None]
    assert taken[1] is not None
    assert taken[1].memory[5:8] == b"abc"
    arena.release(arena.slots[0])
    assert arena.acquire() is arena.slots[0]


def test_more_or_fewer_slots_than_are_wanted_now_are_made_anew() -> None:
    before = arena_of(100, num_slots=3)
    arena = made(num_slots=2)
    arena.adopt(before.slots)
    before.close()
    assert not arena.fits(1)
    arena.allocate(1)
    assert arena.fits(1)
    assert len(arena.slots) == 2


def test_a_slot_that_was_truncated_is_not_taken_over() -> None:
    """Its process was killed while it freed its slots: reading one would be a bus error."""
    before = arena_of(10 * MIB, num_slots=2)
    os.ftruncate(before.slots[1].fd, 4096)
    arena = made(num_slots=2)
    with pytest.raises(ValueError, match="slot 1 has 4096 bytes, not 11014144"):
        arena.adopt(before.slots)
    assert arena.slots == ()
    assert [os.fstat(slot.fd).st_size for slot in before.slots] == [before.slot_bytes, 4096]


class Recorded:
    """Pins that note when they are released."""

    def __init__(self, calls: list[str], num_bytes: int, *, is_stuck: bool = False) -> None:
        self.num_bytes, self.seconds = num_bytes, 1.5
        self._calls, self._is_stuck = calls, is_stuck

    def release(self, *, hurry: threading.Event | None = None) -> bool:
        self._calls.append(f"unpin {self.num_bytes}")
        return not self._is_stuck


class RecordingPinner(Pinner):
    """Pins nothing, and says so.

    ``wanted``: whether it would pin. ``is_deaf``: it waits for ``gate``, even when in a hurry.
    ``until_hurried``: it waits until somebody is in a hurry.
    """

    piece_bytes = 8192

    def __init__(self, *, is_stuck: bool = False) -> None:
        self.calls: list[str] = []
        self.wanted = True
        self.has_begun = threading.Event()
        self.until_hurried = False
        self.is_deaf = False
        self.gate = threading.Event()
        self._is_stuck = is_stuck

    def is_wanted(self) -> bool:
        return self.wanted

    def pin(
        self, address: int, num_bytes: int, *, hurry: threading.Event, stop: threading.Event
    ) -> Pins | None:
        self.has_begun.set()
        if self.is_deaf:
            assert self.gate.wait(DEADLINE_S)
        if self.until_hurried:
            assert hurry.wait(DEADLINE_S)
        if not self.wanted or stop.is_set():
            return None
        self.calls.append(f"pin {num_bytes}")
        return Recorded(self.calls, num_bytes, is_stuck=self._is_stuck)


def pinned_arena(pinner: Pinner, state_bytes: int, *, num_slots: int = 2) -> Arena:
    arena = made(pinner, num_slots=num_slots, host_memory_limit=1 << 30)
    arena.allocate(state_bytes)
    return arena


def being_pinned(pinner: RecordingPinner, *, state_bytes: int = 10 * MIB) -> Arena:
    arena = pinned_arena(pinner, state_bytes)
    assert pinner.has_begun.wait(DEADLINE_S)
    return arena


@pytest.mark.parametrize("ends", ["allocate", "close"])
def test_memory_that_cannot_be_unpinned_is_neither_truncated_nor_unmapped(ends: str) -> None:
    arena = pinned_arena(RecordingPinner(is_stuck=True), 1, num_slots=1)
    (slot,) = arena.slots
    arena.allocate(MIB) if ends == "allocate" else arena.close()
    assert slot not in arena.slots
    assert os.fstat(slot.fd).st_size == slot.num_bytes
    slot.memory[:3] = b"abc"
    address = slot.address
    del slot
    gc.collect()
    assert ctypes.string_at(address, 3) == b"abc"


def test_memory_that_a_driver_is_still_pinning_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    pinner = RecordingPinner()
    pinner.is_deaf = True
    arena = being_pinned(pinner)
    slots = arena.slots
    arena.close()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "the driver may hang" in record.getMessage()
    assert all(os.fstat(slot.fd).st_size == slot.num_bytes for slot in slots)
    pinner.gate.set()


def test_slots_taken_over_or_left_unpinned_are_pinned_later_once_they_are_free() -> None:
    before = arena_of(20 * MIB, num_slots=2)
    pinner = RecordingPinner()
    pinner.wanted = False  # the device is not in use yet
    arena = made(pinner, num_slots=2)
    arena.adopt(before.slots)
    arena.fault_in()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    arena.pin()
    assert arena.is_ready()
    assert pinner.calls == []
    busy = arena.acquire()
    assert busy is not None
    pinner.wanted = True
    for pinned in ([False, True], [True, True], [True, True]):
        arena.pin()
        assert arena.wait_ready(timeout_s=DEADLINE_S)
        assert [slot.pins is not None for slot in arena.slots] == pinned
        arena.release(busy)
    assert len(pinner.calls) == 2


def test_closing_ends_the_pinning_early() -> None:
    pinner = RecordingPinner()
    pinner.until_hurried = True
    arena = being_pinned(pinner, state_bytes=20 * MIB)
    arena.close()
    assert pinner.calls == []


def test_a_background_error_is_raised_by_wait_ready() -> None:
    class Refuses(RecordingPinner):
        def pin(self, *_: object, **__: object) -> Pins | None:
            raise MemoryError("cannot pin")

    arena = pinned_arena(Refuses(), 1)
    with pytest.raises(MemoryError, match="cannot pin"):
        arena.wait_ready(timeout_s=10.0)


@pytest.mark.parametrize(("size", "slack"), [(20_000, 0.5), (4_000_000, 0.0)])
def test_a_state_that_outgrows_its_slots_goes_on_in_larger_ones_and_slack_spares_that(
    tmp_path: Path, size: int, slack: float
) -> None:
    run = {"history": torch.arange(float(size))}
    with managed(tmp_path, CFCheckpoint(run=run), config=config(arena_slack=slack)) as manager:
        manager.save(wait=True)
        before = manager._pipeline._arena.slots
        for _ in range(2):
            run["history"] = torch.cat([run["history"], run["history"][: size // 5]])
            manager.step()
            manager.save(wait=True)
        is_spared = manager._pipeline._arena.slots == before
        assert is_spared is (slack > 0.0)
        assert all(slot.memory.closed is not is_spared for slot in before)
    restored: dict[str, torch.Tensor] = {}
    with managed(tmp_path, CFCheckpoint(run=restored)) as manager:
        assert manager.restore()
    assert torch.equal(restored["history"], run["history"])


# ---- how much memory there is


V2, V1 = "v2/job/memory", "v1/job/memory"
#: Files beside those of a machine that has memory, with what is available and a container's limit.
CGROUPS: dict[str, tuple[dict[str, str], int | None, int | None]] = {
    "none but the machine": ({f"{V2}.max": "max\n", f"{V2}.current": "5"}, 4000 * 1024, None),
    "the tightest that encloses": (
        {
            "v2/memory.max": "3000000",
            "v2/memory.current": "0",
            f"{V2}.max": "2000000",
            f"{V2}.current": "500000",
            "v2/job/task/memory.max": "1900000",
            "v2/job/task/memory.current": "100000",
        },
        1_500_000,
        1_900_000,
    ),
    "page cache is not used": (
        {
            f"{V2}.max": "2000000",
            f"{V2}.current": "1900000",
            f"{V2}.stat": "anon 1\ninactive_file 300000\nactive_file 100000\n",
        },
        500_000,
        2_000_000,
    ),
    "version one": (
        {f"{V1}.limit_in_bytes": "1000000", f"{V1}.usage_in_bytes": "1200000"},
        0,
        1_000_000,
    ),
    "more than there is": ({f"{V2}.max": "99999999", f"{V2}.current": "1"}, 4000 * 1024, None),
    "unreadable": (
        {"meminfo": "MemAvailable:\n", "own": "", f"{V2}.max": "1000", f"{V2}.current": "many"},
        None,
        None,
    ),
    "unreadable cache": (
        {f"{V2}.max": "1000", f"{V2}.current": "1", f"{V2}.stat": "not a pair of words"},
        999,
        1000,
    ),
}


@pytest.mark.parametrize(("files", "available", "limit"), CGROUPS.values(), ids=CGROUPS.keys())
def test_what_is_available_is_what_every_cgroup_and_the_machine_leave(
    tmp_path: Path, files: dict[str, str], available: int | None, limit: int | None
) -> None:
    machine = {
        "meminfo": "MemTotal: 8000 kB\nMemAvailable: 4000 kB\n",
        "own": "0::/job/task\n3:cpu:/other\n5:memory:/job\n",
    }
    for name, text in {**machine, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {name: tmp_path / name for name in ("v2", "v1", "meminfo", "own")}
    assert available_host_bytes(**found) == available
    assert cgroup_limit_bytes(**found) == limit
