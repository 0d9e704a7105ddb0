"""Slots: size, limits and owners; and how much host memory is available."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
import threading
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


def arena_of(state_bytes: int, **settings: object) -> Arena:
    arena = Arena(config=CFConfig(**settings))  # type: ignore[arg-type]
    arena.allocate(state_bytes)
    return arena


def test_slots_have_room_for_the_state_and_its_slack() -> None:
    arena = arena_of(10 * MIB, num_slots=3, arena_slack=0.5)
    assert len(arena.slots) == 3
    assert arena.slot_bytes >= 15 * MIB
    assert arena.slot_bytes % 4096 == 0
    assert arena.slot_bytes < 15 * MIB + 3 * 4096
    arena.close()


def test_an_arena_without_slots_has_no_size_and_may_have_room() -> None:
    arena = Arena(config=CFConfig())
    assert arena.slot_bytes == 0
    assert arena.may_have_room()
    assert not arena.has_free_slot()
    assert arena.acquire() is None
    arena.close()


@pytest.mark.parametrize("state_bytes", [1, 40 * MIB])
def test_slots_become_ready(state_bytes: int) -> None:
    """Small ones at once, large ones by a thread; either way every page can be written."""
    arena = arena_of(state_bytes, num_slots=2)
    assert arena.wait_ready(timeout_s=60.0)
    assert arena.is_ready()
    for slot in arena.slots:
        ctypes.memset(slot.address, 1, slot.num_bytes)
    arena.close()


def test_a_slot_has_one_owner_at_a_time() -> None:
    arena = arena_of(100, num_slots=2)
    first, second = arena.acquire(), arena.acquire()
    assert first is not None
    assert second is not None
    assert first is not second
    assert arena.acquire() is None
    assert not arena.may_have_room()
    arena.release(first)
    assert arena.may_have_room()
    assert arena.acquire() is first
    arena.release(first)
    arena.release(second)
    arena.close()


def test_a_slot_is_shared_memory_that_another_process_can_map() -> None:
    arena = arena_of(100, num_slots=1)
    (slot,) = arena.slots
    slot.memory[10:13] = b"abc"
    assert os.pread(slot.fd, 3, 10) == b"abc"
    assert not os.get_inheritable(slot.fd)
    arena.close()


def test_allocating_again_replaces_the_slots() -> None:
    arena = arena_of(100, num_slots=2)
    before = arena.slots
    arena.allocate(10 * MIB)
    assert arena.slot_bytes >= 10 * MIB
    assert not {*before} & {*arena.slots}
    arena.close()
    arena.close()


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
    arena.close()


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
    arena.close()


def test_slots_of_an_earlier_process_are_taken_over_with_what_they_hold() -> None:
    before = arena_of(10 * MIB, num_slots=3)
    before.slots[1].memory[5:8] = b"abc"
    arena = Arena(config=CFConfig(num_slots=3))
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
    arena.close()


def test_slots_taken_over_keep_their_pages_and_get_no_more() -> None:
    before = arena_of(20 * MIB, num_slots=2, arena_slack=0.5)
    assert before.wait_ready(timeout_s=DEADLINE_S)
    before.slots[0].memory[: 20 * MIB : 4096] = b"x" * (20 * MIB // 4096)
    blocks = [os.fstat(slot.fd).st_blocks for slot in before.slots]
    arena = Arena(config=CFConfig(num_slots=2))
    arena.adopt(before.slots)
    arena.fault_in()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert [os.fstat(slot.fd).st_blocks for slot in arena.slots] == blocks
    assert arena.slots[0].memory[: 20 * MIB : 4096] == b"x" * (20 * MIB // 4096)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for slot in arena.slots:
        ctypes.memset(slot.address, 1, 20 * MIB)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 100
    arena.close()
    before.close()


def test_slots_taken_over_are_pinned_in_the_background() -> None:
    before = arena_of(10 * MIB, num_slots=1)
    pinner = RecordingPinner()
    arena = Arena(config=CFConfig(num_slots=1), pinner=pinner)
    arena.adopt(before.slots)
    arena.fault_in()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert not pinner.calls
    arena.pin()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert pinner.calls == [f"pin {arena.slot_bytes}"]
    arena.close()
    before.close()


def test_more_or_fewer_slots_than_are_wanted_now_are_made_anew() -> None:
    before = arena_of(100, num_slots=3)
    arena = Arena(config=CFConfig(num_slots=2))
    arena.adopt(before.slots)
    before.close()
    assert not arena.fits(1)
    arena.allocate(1)
    assert arena.fits(1)
    assert len(arena.slots) == 2
    arena.close()


def test_a_slot_that_was_truncated_is_not_taken_over() -> None:
    """Its process was killed while it freed its slots: reading one would be a bus error."""
    before = arena_of(10 * MIB, num_slots=2)
    os.ftruncate(before.slots[1].fd, 4096)
    arena = Arena(config=CFConfig(num_slots=2))
    with pytest.raises(ValueError, match="slot 1 has 4096 bytes, not 11014144"):
        arena.adopt(before.slots)
    assert arena.slots == ()
    assert [os.fstat(slot.fd).st_size for slot in before.slots] == [before.slot_bytes, 4096]
    before.close()


class Recorded:
    """Pins that note when they are released, and whether the slot's file was still whole then."""

    def __init__(self, calls: list[str], num_bytes: int, *, is_stuck: bool = False) -> None:
        self.num_bytes, self.seconds = num_bytes, 1.5
        self.fd = -1
        self._calls, self._is_stuck = calls, is_stuck

    def release(self, *, hurry: threading.Event | None = None) -> bool:
        size = os.fstat(self.fd).st_size if self.fd >= 0 else self.num_bytes
        self._calls.append(f"unpin {self.num_bytes} of {size}")
        return not self._is_stuck


class RecordingPinner(Pinner):
    """Pins nothing, and says so.

    ``wanted``: whether it would pin. ``is_deaf``: it waits for ``gate``, even when in a hurry.
    ``until_hurried``: it waits until somebody is in a hurry.
    """

    piece_bytes = 8192

    def __init__(self, *, is_stuck: bool = False) -> None:
        self.calls: list[str] = []
        self.pins: list[Recorded] = []
        self.threads: set[str] = set()
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
        self.threads.add(threading.current_thread().name)
        self.has_begun.set()
        if self.is_deaf:
            assert self.gate.wait(DEADLINE_S)
        if self.until_hurried:
            assert hurry.wait(DEADLINE_S)
        if not self.wanted or stop.is_set():
            return None
        self.calls.append(f"pin {num_bytes}")
        self.pins.append(Recorded(self.calls, num_bytes, is_stuck=self._is_stuck))
        return self.pins[-1]


def pinned_arena(pinner: Pinner, state_bytes: int, *, num_slots: int = 2) -> Arena:
    config = CFConfig(num_slots=num_slots, host_memory_limit=1 << 30)
    arena = Arena(config=config, pinner=pinner, close_timeout_s=0.05)
    arena.allocate(state_bytes)
    return arena


def test_slots_are_pinned_and_unpinned_with_the_arena() -> None:
    pinner = RecordingPinner()
    arena = pinned_arena(pinner, 1)
    size = arena.slot_bytes
    assert pinner.calls == [f"pin {size}"] * 2
    assert all(slot.piece_bytes == 8192 for slot in arena.slots)
    arena.close()
    arena.close()
    assert pinner.calls == [f"pin {size}"] * 2 + [f"unpin {size} of {size}"] * 2


def test_how_long_pinning_took_is_logged_once_for_all_slots(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        arena = pinned_arena(RecordingPinner(), MIB)
    assert [record.getMessage() for record in caplog.records] == ["pinned 2.1 MiB in 3 s"]
    arena.close()


def test_slots_are_unpinned_before_their_memory_is_given_back() -> None:
    pinner = RecordingPinner()
    arena = pinned_arena(pinner, 1, num_slots=1)
    (slot,) = arena.slots
    size = pinner.pins[0].num_bytes
    with open(f"/proc/self/fd/{slot.fd}", "rb") as as_in_the_worker:
        pinner.pins[0].fd = as_in_the_worker.fileno()
        arena.allocate(MIB)
        assert pinner.calls[1] == f"unpin {size} of {size}"
        assert os.fstat(as_in_the_worker.fileno()).st_size == 0, "its pages are free"
    arena.close()


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
    arena.close()


def test_memory_that_a_driver_is_still_pinning_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    pinner = RecordingPinner()
    pinner.is_deaf = True
    arena = pinned_arena(pinner, 10 * MIB)
    assert pinner.has_begun.wait(DEADLINE_S)
    slots = arena.slots
    arena.close()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "the driver may hang" in record.getMessage()
    assert all(os.fstat(slot.fd).st_size == slot.num_bytes for slot in slots)
    pinner.gate.set()


def test_large_slots_are_pinned_in_the_background_and_small_ones_at_once() -> None:
    for state_bytes, thread in [(1, threading.current_thread().name), (MIB * 9, "checkfreq-")]:
        pinner = RecordingPinner()
        arena = pinned_arena(pinner, state_bytes)
        assert arena.wait_ready(timeout_s=DEADLINE_S)
        (name,) = pinner.threads
        assert name.startswith(thread)
        arena.close()


def test_snapshots_wait_while_slots_are_being_pinned() -> None:
    pinner = RecordingPinner()
    pinner.is_deaf = True
    arena = pinned_arena(pinner, 10 * MIB)
    assert pinner.has_begun.wait(DEADLINE_S)
    assert not arena.is_ready()
    assert not arena.may_have_room()
    assert not arena.wait_ready(timeout_s=0.0)
    pinner.gate.set()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert arena.may_have_room()
    arena.close()


def test_a_checkpoint_that_must_be_taken_waits_for_one_pinned_slot_only() -> None:
    pinner = RecordingPinner()
    pinner.until_hurried = True
    arena = pinned_arena(pinner, 10 * MIB)
    assert pinner.has_begun.wait(DEADLINE_S)
    arena.hurry()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert [slot.pins is not None for slot in arena.slots] == [True, False]
    taken = arena.acquire()
    assert taken is not None
    assert taken.pins is not None
    arena.close()


def test_slots_left_unpinned_are_pinned_later_once_they_are_free() -> None:
    pinner = RecordingPinner()
    pinner.wanted = False  # the device is not in use yet
    arena = pinned_arena(pinner, 20 * MIB)
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    arena.pin()
    assert arena.is_ready()
    assert pinner.calls == []
    busy = arena.acquire()
    assert busy is not None
    pinner.wanted, pinner.is_deaf = True, True
    arena.pin()
    assert not arena.may_have_room(), "snapshots wait"
    pinner.gate.set()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert [slot.pins is not None for slot in arena.slots] == [False, True]
    arena.release(busy)
    arena.pin()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    arena.pin()
    assert [slot.pins is not None for slot in arena.slots] == [True, True]
    assert len(pinner.calls) == 2
    assert all(name.startswith("checkfreq-") for name in pinner.threads)
    arena.close()


def test_closing_ends_the_pinning_early() -> None:
    pinner = RecordingPinner()
    pinner.until_hurried = True
    arena = pinned_arena(pinner, 20 * MIB)
    assert pinner.has_begun.wait(DEADLINE_S)
    arena.close()
    assert pinner.calls == []


def test_a_background_error_is_raised_by_wait_ready() -> None:
    class Refuses(RecordingPinner):
        def pin(
            self, address: int, num_bytes: int, *, hurry: threading.Event, stop: threading.Event
        ) -> Pins | None:
            raise MemoryError("cannot pin")

    arena = pinned_arena(Refuses(), 1)
    with pytest.raises(MemoryError, match="cannot pin"):
        arena.wait_ready(timeout_s=10.0)
    arena.close()


def test_a_state_that_grows_gets_larger_slots(tmp_path: Path) -> None:
    """LBFGS binds new tensors and more of them at each step."""
    model = torch.nn.Linear(2000, 1, bias=False)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1, history_size=50)
    chk = CFCheckpoint(model=model, optimizer=optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 2000)).square().sum()
        loss.backward()
        return loss

    with managed(tmp_path, chk, config=config(arena_slack=0.0)) as manager:
        sizes = []
        for _ in range(12):
            manager.weight_update(closure=closure)
            manager.step()
            manager.save()
            sizes.append(manager.stats()["state_bytes"])
        state = {
            name: t.clone()
            for name, t in optimizer.state_dict()["state"][0].items()
            if isinstance(t, torch.Tensor)
        }
        direction = list(optimizer.state_dict()["state"][0]["old_dirs"])
    assert sizes == sorted(sizes)
    assert sizes[-1] > 2 * sizes[0]
    restored = torch.optim.LBFGS(model.parameters(), max_iter=1, history_size=50)
    with managed(tmp_path, CFCheckpoint(model=model, optimizer=restored)) as manager:
        assert manager.restore()
        assert manager.global_step == 12
    live = restored.state_dict()["state"][0]
    for name, tensor in state.items():
        assert torch.equal(live[name], tensor)
    assert all(map(torch.equal, live["old_dirs"], direction))


def test_slack_spares_small_growth_a_new_allocation(tmp_path: Path) -> None:
    run = {"history": torch.zeros(20_000)}
    with managed(tmp_path, CFCheckpoint(run=run), config=config(arena_slack=0.5)) as manager:
        manager.save(wait=True)
        before = manager._pipeline._arena.slots
        run["history"] = torch.zeros(25_000)
        manager.step()
        manager.save(wait=True)
        assert manager._pipeline._arena.slots == before


def test_a_state_that_outgrows_large_slots_goes_on_in_larger_ones(tmp_path: Path) -> None:
    run = {"history": torch.arange(5e6)}
    with managed(tmp_path, CFCheckpoint(run=run), config=config(arena_slack=0.0)) as manager:
        manager.save(wait=True)
        before = manager._pipeline._arena.slots
        for _ in range(2):
            run["history"] = torch.cat([run["history"], run["history"]])
            manager.step()
            manager.save(wait=True)
        assert all(slot.memory.closed for slot in before)
    restored: dict[str, torch.Tensor] = {}
    with managed(tmp_path, CFCheckpoint(run=restored)) as manager:
        assert manager.restore()
    assert torch.equal(restored["history"], run["history"])


# ---- how much memory there is


class Machine:
    """A fake /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.v2, self.v1 = root / "v2", root / "v1"
        self.meminfo, self.own = root / "meminfo", root / "cgroup"
        self.meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 4000 kB\n")
        self.own.write_text("0::/job/task\n")

    def group(self, base: Path, **files: str) -> None:
        base.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (base / name.replace("__", ".")).write_text(text)

    def available(self) -> int | None:
        return available_host_bytes(v2=self.v2, v1=self.v1, meminfo=self.meminfo, own=self.own)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_limits_the_machines_memory_counts(machine: Machine) -> None:
    machine.group(machine.v2 / "job", memory__max="max\n", memory__current="5")
    assert machine.available() == 4000 * 1024


def test_the_tightest_enclosing_cgroup_decides(machine: Machine) -> None:
    machine.group(machine.v2, memory__max="3000000", memory__current="0")
    machine.group(machine.v2 / "job", memory__max="2000000", memory__current="500000")
    machine.group(machine.v2 / "job/task", memory__max="1900000", memory__current="100000")
    assert machine.available() == 1_500_000


def test_page_cache_is_not_counted_as_used(machine: Machine) -> None:
    machine.group(
        machine.v2 / "job",
        memory__max="2000000",
        memory__current="1900000",
        memory__stat="anon 1\ninactive_file 300000\nactive_file 100000\n",
    )
    assert machine.available() == 500_000


def test_version_one_limits_count_too(machine: Machine) -> None:
    machine.own.write_text("3:cpu:/other\n5:memory:/job\n")
    machine.group(
        machine.v1 / "job", memory__limit_in_bytes="1000000", memory__usage_in_bytes="1200000"
    )
    assert machine.available() == 0


def test_unreadable_files_set_no_limit(machine: Machine) -> None:
    machine.own.unlink()
    machine.group(machine.v2, memory__max="1000", memory__current="many")
    machine.meminfo.write_text("MemTotal: 1 kB\n")
    assert machine.available() is None
    machine.meminfo.write_text("MemAvailable:\n")
    assert machine.available() is None
    machine.group(
        machine.v2, memory__max="1000", memory__current="1", memory__stat="not a pair of words"
    )
    assert machine.available() == 999


def test_the_smallest_limit_is_that_of_the_container(machine: Machine) -> None:
    def limit() -> int | None:
        return cgroup_limit_bytes(
            v2=machine.v2, v1=machine.v1, meminfo=machine.meminfo, own=machine.own
        )

    assert limit() is None
    machine.group(machine.v2 / "job", memory__max="90000\n")
    machine.group(machine.v2 / "job" / "task", memory__max="max\n")
    machine.group(machine.v1 / "job", memory__limit_in_bytes="9223372036854771712\n")
    assert limit() == 90_000
    machine.group(machine.v2 / "job", memory__max="99999999\n")  # more than there is
    assert limit() is None
