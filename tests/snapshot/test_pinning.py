"""Slots are page-locked in pieces, all of it or nothing, and no copy crosses two pieces."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkfreq.config import CFConfig
from checkfreq.errors import ConfigError
from checkfreq.snapshot.arena import Arena
from checkfreq.snapshot.device_copier import Limits
from checkfreq.snapshot.node_turns import NodeTurns
from checkfreq.snapshot.pin_failures import Machine
from checkfreq.snapshot.pinning import DevicePinner, PinnedPieces
from checkfreq.types import PAGE_BYTES, SnapshotPlace
from tests.snapshot.fake_device import FakeDevice, Seeded
from tests.snapshot.recorder import PLACES, Recorder, State

MIB = 1 << 20
#: Only a defect reaches it.
DEADLINE_S = 60.0
MACHINE = Machine("6.8.0-45-generic", "NVIDIA 580.65.06")


@pytest.fixture
def address() -> Iterator[int]:
    """Five pages."""
    memory = mmap.mmap(-1, 5 * PAGE_BYTES)
    yield ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory.close()


def pinner_of(fake: FakeDevice, path: Path, **settings: object) -> DevicePinner:
    settings = {"piece_bytes": PAGE_BYTES, "turns": NodeTurns(path / "lock"), **settings}
    return DevicePinner(fake, machine=MACHINE, **settings)  # type: ignore[arg-type]


def pinned(
    pinner: DevicePinner,
    address: int,
    *,
    hurry: threading.Event | None = None,
) -> PinnedPieces | None:
    """Five pages pinned."""
    hurry = hurry or threading.Event()
    return pinner.pin(address, 5 * PAGE_BYTES, hurry=hurry, stop=threading.Event())


# ---- pieces


def test_a_slot_is_pinned_in_pieces_and_unpinned_in_threads_of_its_own(
    fake: FakeDevice, address: int, tmp_path: Path
) -> None:
    """A call that fails leaves its error in the thread (the fake refuses any other thread)."""
    pieces = pinned(pinner_of(fake, tmp_path, piece_bytes=2 * PAGE_BYTES), address)
    assert pieces is not None
    sizes = [2 * PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES]
    assert [*fake.registrations.ranges.values()] == sizes
    assert pieces.release()
    assert pieces.release()
    assert fake.registrations.ranges == {}
    assert fake.registrations.threads == {"checkfreq-pin"}


@pytest.mark.parametrize("is_stuck", [False, True], ids=["", "one cannot be unpinned again"])
@pytest.mark.parametrize("fail_at", [1, 4])
def test_if_a_piece_fails_none_stays_pinned_and_copies_go_on_with_what_does(
    fake: FakeDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture, fail_at: int, is_stuck: bool
) -> None:
    """Nothing is tried again; a copy may not leave a piece that remains."""
    if is_stuck:
        fake.registrations.before = lambda begin: fake.registrations.stuck.add(begin)
    fake.registrations.fail_at = fail_at
    pinner, state = pinner_of(fake, tmp_path), state_across_borders(fake)
    assert pinner.is_wanted()
    recorder = Recorder(fake, state, pinner=pinner, state_bytes=64 << 10)
    assert not pinner.is_wanted()
    remaining = fake.registrations.num_bytes // PAGE_BYTES
    assert remaining == (fail_at - 1 if is_stuck else 0)
    for _ in range(2):
        recorder.take()
        recorder.arena.pin()
    first, *more = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert first[0] == "WARNING"
    for text in ("error 2 (cudaErrorMemory", "Linux 6.8.0-45-generic, driver NVIDIA 580.65.06"):
        assert text in first[1]
    assert [level for level, _ in more] == ["ERROR"] * (remaining > 0)
    fake.registrations.stuck = set()
    recorder.finish()
    assert fake.registrations.ranges == {}


def test_unpinning_that_hangs_is_given_up(
    fake: FakeDevice, address: int, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    fake.registrations.before_undo = lambda _: gate.wait(DEADLINE_S)
    pieces = PinnedPieces(fake, timeout_s=0.01)
    pieces.add(address, PAGE_BYTES, seconds=1.0)
    assert not pieces.release()
    assert "the driver did not answer within 0.01 s" in caplog.text
    gate.set()


def test_after_each_piece_others_have_their_turn_for_as_long_as_the_piece_took(
    fake: FakeDevice, address: int, tmp_path: Path
) -> None:
    order: list[str] = []
    clock = itertools.accumulate(itertools.count()).__next__  # 1 s, then 3 s, 5 s and 7 s pass

    class Turns(NodeTurns):
        @contextlib.contextmanager
        def turn(self, hurry: threading.Event) -> Iterator[None]:
            order.append("turn")
            yield
            order.append("end")

    class Pause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            order.append(f"pause {timeout}")
            return False

    fake.registrations.before = fake.registrations.before_undo = lambda _: order.append("call")
    pinner = pinner_of(fake, tmp_path, turns=Turns(), piece_bytes=3 * PAGE_BYTES, clock=clock)
    pieces = pinned(pinner, address, hurry=Pause())
    assert pieces is not None
    assert order == ["turn", "call", "pause 1", "end", "turn", "call", "end"]
    assert pieces.seconds == 1 + 3
    order.clear()
    assert pieces.release(hurry=Pause())
    assert order == ["turn", "call", "pause 5", "end", "turn", "call", "end"]


# ---- slots that the state has outgrown


class Outgrown:
    """Large slots that are pinned, and a driver that unpins them only once ``gate`` is open.

    ``have``: the files of all slots so far, as the worker has them.
    """

    def __init__(self, fake: FakeDevice, path: Path, *, available_bytes: int = 1 << 40) -> None:
        self.available_bytes = available_bytes
        self.arena = Arena(
            config=CFConfig(num_slots=2, arena_slack=0.0),
            pinner=pinner_of(fake, path, piece_bytes=4 * MIB),
            available_bytes=lambda: self.available_bytes,
        )
        self.have: list[int] = []
        self.begun, self.gate = threading.Event(), threading.Event()
        self.allocate(10 * MIB)
        assert self.arena.wait_ready(timeout_s=DEADLINE_S)
        fake.registrations.before_undo = self._held

    def _held(self, _: int) -> None:
        self.begun.set()
        assert self.gate.wait(DEADLINE_S)

    def allocate(self, state_bytes: int) -> None:
        self.arena.allocate(state_bytes)
        self.have += [os.dup(slot.fd) for slot in self.arena.slots]

    def resident(self) -> list[int]:
        """Mebibytes that each slot so far has, rounded down."""
        return [os.fstat(fd).st_blocks * 512 // MIB for fd in self.have]

    def close(self) -> None:
        self.gate.set()
        self.arena.close()
        for fd in self.have:
            os.close(fd)


def test_training_goes_on_while_slots_that_are_too_small_are_unpinned(
    fake: FakeDevice, tmp_path: Path
) -> None:
    outgrown = Outgrown(fake, tmp_path)
    arena, old = outgrown.arena, outgrown.arena.slots
    resident_when_pinned: list[list[int]] = []
    fake.registrations.before = lambda _: resident_when_pinned.append(outgrown.resident()[:2])
    outgrown.allocate(20 * MIB)
    assert outgrown.begun.wait(DEADLINE_S)
    assert arena.fits(20 * MIB)
    assert not arena.is_ready()
    assert not arena.may_have_room()
    assert outgrown.resident() == [10, 10, 0, 0]
    outgrown.gate.set()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert all(slot.memory.closed for slot in old)
    assert {*map(tuple, resident_when_pinned)} == {(0, 0)}, "gone before new ones get memory"
    assert outgrown.resident() == [0, 0, 20, 20]
    assert fake.registrations.num_bytes == sum(slot.num_bytes for slot in arena.slots)
    outgrown.close()
    assert fake.registrations.ranges == {}


def test_old_slots_count_as_memory_for_new_ones(fake: FakeDevice, tmp_path: Path) -> None:
    outgrown = Outgrown(fake, tmp_path)
    outgrown.available_bytes = 25 * MIB
    outgrown.allocate(20 * MIB)
    assert len(outgrown.arena.slots) == 2
    outgrown.available_bytes = 5 * MIB  # some of it is being given back
    outgrown.allocate(21 * MIB)
    assert len(outgrown.arena.slots) == 2
    with pytest.raises(ConfigError, match=r"available to this process is 45\.\d MiB"):
        outgrown.allocate(50 * MIB)
    assert outgrown.arena.fits(21 * MIB), "they stay"
    outgrown.close()


def test_closing_unpins_slots_that_are_being_replaced(fake: FakeDevice, tmp_path: Path) -> None:
    outgrown = Outgrown(fake, tmp_path)
    slots = outgrown.arena.slots
    outgrown.allocate(20 * MIB)
    slots += outgrown.arena.slots
    assert outgrown.begun.wait(DEADLINE_S)
    closing = threading.Thread(target=outgrown.close)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert all(slot.memory.closed for slot in slots)
    assert fake.registrations.ranges == {}


def test_a_checkpoint_that_must_be_taken_has_old_slots_unpinned_without_pauses(
    fake: FakeDevice, tmp_path: Path
) -> None:
    outgrown = Outgrown(fake, tmp_path)
    outgrown.gate.set()
    with NodeTurns(tmp_path / "lock").turn(threading.Event()):  # another process has it
        outgrown.allocate(20 * MIB)
        assert not outgrown.arena.is_ready()
        outgrown.arena.hurry()
        assert outgrown.arena.wait_ready(timeout_s=DEADLINE_S)
    outgrown.close()


# ---- copies


def state_across_borders(fake: FakeDevice) -> State:
    """Tensors that the state of a slot of pages has across borders, one for each way to copy."""
    state = State(fake)
    state.add("plain", torch.arange(2000.0), settled=True)
    state.add("volatile", torch.arange(1500.0))
    state.add("wide", torch.arange(300.0).to(torch.complex128), settled=True)
    state.add("turned", torch.arange(1600.0).reshape(40, 40).t(), settled=True)
    state.add("odd", torch.arange(4099).to(torch.uint8), settled=True)
    return state


@PLACES
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("has_room", [True, False], ids=["", "without room for buffers"])
def test_copies_are_cut_where_registrations_meet(
    place: SnapshotPlace, seed: int, has_room: bool, tmp_path: Path
) -> None:
    fake = FakeDevice(Seeded(seed))
    state = state_across_borders(fake)
    limits = Limits(small_bytes=8, transpose_bytes=3000, chunk_bytes=5000, reserve_bytes=0)
    if not has_room:
        fake.memory().free = 0
        limits = replace(limits, small_bytes=3000)  # strided tensors go in pieces of this size
    pinner = pinner_of(fake, tmp_path)
    recorder = Recorder(fake, state, limits=limits, pinner=pinner, state_bytes=64 << 10)
    assert all(slot.pins is not None for slot in recorder.arena.slots)
    recorder.take(place)
    recorder.update(["plain", "turned"], 9)
    recorder.finish()


# ---- at the end of a process


def test_slots_can_be_unpinned_while_the_interpreter_ends(
    fake: FakeDevice, address: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on no thread can be started then."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    pieces = pinned(pinner_of(fake, tmp_path), address)
    assert pieces is not None
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert pieces.release()
    assert fake.registrations.ranges == {}
