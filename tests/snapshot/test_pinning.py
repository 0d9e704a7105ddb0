"""Slots are page-locked in pieces, all of it or nothing, and no copy crosses two pieces."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
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
from checkfreq.snapshot.pinning import PIECE_BYTES, DevicePinner, PinnedPieces
from checkfreq.types import PAGE_BYTES, SnapshotPlace
from tests.snapshot.fake_device import FakeDevice, Scripted, Seeded
from tests.snapshot.recorder import PLACES, TINY, Recorder, State, small_state
from tests.snapshot.test_device_engine import random_values

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


class Pauses(threading.Event):
    """Notes how long it was waited for; ``set_after``: set when it has been, so many times."""

    def __init__(self, *, set_after: int | None = None) -> None:
        super().__init__()
        self.seconds: list[float | None] = []
        self._set_after = set_after

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        if len(self.seconds) == self._set_after:
            self.set()
        return self.is_set()


class Ticks:
    """A clock; a piece takes 3 s, then 4 s, and so on."""

    def __init__(self) -> None:
        self._now_s, self._num_read = 0.0, 0

    def __call__(self) -> float:
        self._num_read += 1
        if self._num_read % 2 == 0:
            self._now_s += 2 + self._num_read // 2
        return self._now_s


def pinner_of(fake: FakeDevice, path: Path, **settings: object) -> DevicePinner:
    settings = {"piece_bytes": PAGE_BYTES, "turns": NodeTurns(path / "lock"), **settings}
    return DevicePinner(fake, machine=MACHINE, **settings)  # type: ignore[arg-type]


def pinned(
    pinner: DevicePinner,
    address: int,
    *,
    hurry: threading.Event | None = None,
    stop: threading.Event | None = None,
) -> PinnedPieces | None:
    """Five pages pinned."""
    hurry, stop = hurry or Pauses(), stop or threading.Event()
    return pinner.pin(address, 5 * PAGE_BYTES, hurry=hurry, stop=stop)


class PinnedRecorder(Recorder):
    """A recorder whose slots ``pinner`` pins."""

    def __init__(
        self,
        fake: FakeDevice,
        state: State,
        *,
        pinner: DevicePinner,
        limits: Limits = TINY,
        state_bytes: int = 8 << 10,
    ) -> None:
        super().__init__(fake, state, limits=limits)
        self.arena.close()
        self.arena = Arena(config=CFConfig(host_memory_limit=1 << 30), pinner=pinner)
        self.arena.allocate(state_bytes)
        for slot in self.arena.slots:
            self._fill(slot)


# ---- pieces


def test_a_slot_is_pinned_in_pieces_and_unpinned_in_threads_of_its_own(
    fake: FakeDevice, address: int, tmp_path: Path
) -> None:
    """A call that fails leaves its error in the thread (the fake refuses any other thread)."""
    pieces = pinned(pinner_of(fake, tmp_path, piece_bytes=2 * PAGE_BYTES), address)
    assert pieces is not None
    sizes = [2 * PAGE_BYTES, 2 * PAGE_BYTES, PAGE_BYTES]
    begins = [address, address + 2 * PAGE_BYTES, address + 4 * PAGE_BYTES]
    assert fake.registrations.ranges == dict(zip(begins, sizes, strict=True))
    assert pieces.num_bytes == 5 * PAGE_BYTES
    assert pieces.release()
    assert pieces.release()
    assert fake.registrations.ranges == {}
    assert fake.registrations.threads == {"checkfreq-pin"}


def test_no_piece_is_as_large_as_any_kernel_or_driver_refuses(tmp_path: Path) -> None:
    assert PIECE_BYTES < 2 << 30
    assert PIECE_BYTES % PAGE_BYTES == 0
    assert DevicePinner(FakeDevice(Scripted())).piece_bytes == PIECE_BYTES


@pytest.mark.parametrize("fail_at", [1, 3, 5])
def test_if_a_piece_fails_none_stays_pinned_and_it_is_not_tried_again(
    fake: FakeDevice,
    address: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    fail_at: int,
) -> None:
    fake.registrations.fail_at = fail_at
    pinner = pinner_of(fake, tmp_path)
    assert pinner.is_wanted()
    assert pinned(pinner, address) is None
    assert fake.registrations.ranges == {}
    assert fake.registrations.calls == ["register"] * fail_at + ["unregister"] * (fail_at - 1)
    assert not pinner.is_wanted()
    assert pinned(pinner, address) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    text = record.getMessage()
    assert "cudaHostRegister returned error 2 (cudaErrorMemoryAllocation)" in text
    assert "Linux 6.8.0-45-generic, driver NVIDIA 580.65.06" in text
    assert "ulimit" not in text


def test_pieces_that_cannot_be_undone_are_reported_and_kept(
    fake: FakeDevice, address: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake.registrations.fail_at = 4
    fake.registrations.stuck = {address + PAGE_BYTES}
    pieces = pinned(pinner_of(fake, tmp_path), address)
    assert pieces is not None
    assert pieces.num_bytes == PAGE_BYTES
    assert fake.registrations.ranges == {address + PAGE_BYTES: PAGE_BYTES}
    assert not pieces.release(), "every other one is"
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "ERROR", "ERROR"]
    assert "cudaHostUnregister returned error 999 (cudaErrorUnknown)" in caplog.text
    fake.registrations.stuck = set()
    assert pieces.release()


def test_an_exception_of_the_driver_is_a_failure_like_any_other(
    fake: FakeDevice, address: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def no_context(_: int) -> None:
        raise RuntimeError("no context")

    fake.registrations.before = no_context
    assert pinned(pinner_of(fake, tmp_path), address) is None
    assert "RuntimeError: no context" in caplog.text


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


# ---- over time


def test_after_each_piece_the_driver_is_free_for_as_long_as_the_piece_took(
    fake: FakeDevice, address: int, tmp_path: Path
) -> None:
    hurry = Pauses()
    pinner = pinner_of(fake, tmp_path, clock=Ticks())
    pieces = pinned(pinner, address, hurry=hurry)
    assert pieces is not None
    assert [s for s in hurry.seconds if s is not None and s >= 1] == [3.0, 4.0, 5.0, 6.0]
    assert pieces.seconds == 3 + 4 + 5 + 6 + 7


class NotedTurns(NodeTurns):
    """Says in ``order`` where a turn begins and ends."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self._order = order

    @contextlib.contextmanager
    def turn(self, hurry: threading.Event) -> Iterator[None]:
        self._order.append("turn")
        yield
        self._order.append("end")


def test_each_piece_and_the_pause_after_it_are_one_turn(
    fake: FakeDevice, address: int, tmp_path: Path
) -> None:
    order: list[str] = []

    class Pause(Pauses):
        def wait(self, timeout: float | None = None) -> bool:
            order.append(f"pause {timeout}")
            return super().wait(timeout)

    fake.registrations.before = lambda _: order.append("call")
    fake.registrations.before_undo = lambda _: order.append("call")
    pinner = pinner_of(
        fake, tmp_path, turns=NotedTurns(order), piece_bytes=3 * PAGE_BYTES, clock=Ticks()
    )
    pieces = pinned(pinner, address, hurry=Pause())
    assert pieces is not None
    assert order == ["turn", "call", "pause 3.0", "end", "turn", "call", "end"]
    order.clear()
    assert pieces.release(hurry=Pause())
    assert order == ["turn", "call", "pause 5.0", "end", "turn", "call", "end"]


def test_in_a_hurry_nothing_is_waited_for(fake: FakeDevice, address: int, tmp_path: Path) -> None:
    with NodeTurns(tmp_path / "lock").turn(Pauses()):
        hurry = threading.Event()
        hurry.set()
        pieces = pinned(pinner_of(fake, tmp_path), address, hurry=hurry)
        assert pieces is not None
        assert pieces.release()


def test_pinning_that_is_stopped_leaves_nothing_behind(
    fake: FakeDevice, address: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    fake.registrations.before = lambda begin: begin == address + PAGE_BYTES and stop.set()
    pinner = pinner_of(fake, tmp_path)
    assert pinned(pinner, address, stop=stop) is None
    assert fake.registrations.calls == ["register"] * 2 + ["unregister"] * 2
    assert fake.registrations.ranges == {}
    assert pinner.is_wanted(), "nothing failed"
    assert caplog.records == []


# ---- with the arena


def test_all_slots_are_pinned_with_their_slack_once_the_device_is_used(
    fake: FakeDevice, tmp_path: Path
) -> None:
    """Before, and where it is not at all, the driver is left alone."""
    fake.in_use = False
    arena = Arena(config=CFConfig(host_memory_limit=1 << 30), pinner=pinner_of(fake, tmp_path))
    arena.allocate(20_000)
    assert fake.registrations.calls == []
    fake.in_use = True
    arena.pin()
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    assert fake.registrations.num_bytes == sum(slot.num_bytes for slot in arena.slots)
    arena.close()
    assert fake.registrations.ranges == {}


def test_after_a_failure_copies_go_on_and_nothing_more_is_said(
    fake: FakeDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake.registrations.fail_at = 1
    recorder = PinnedRecorder(fake, small_state(fake), pinner=pinner_of(fake, tmp_path))
    recorder.take()
    recorder.arena.pin()
    recorder.take()
    recorder.finish()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


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


def test_slots_that_are_outgrown_while_they_replace_others_never_get_memory(
    fake: FakeDevice, tmp_path: Path
) -> None:
    outgrown = Outgrown(fake, tmp_path)
    outgrown.allocate(20 * MIB)
    assert outgrown.begun.wait(DEADLINE_S)
    outgrown.allocate(30 * MIB)
    outgrown.gate.set()
    assert outgrown.arena.wait_ready(timeout_s=DEADLINE_S)
    assert outgrown.resident() == [0, 0, 0, 0, 30, 30]
    outgrown.close()


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
    with NodeTurns(tmp_path / "lock").turn(Pauses()):  # another process has it
        outgrown.allocate(20 * MIB)
        assert not outgrown.arena.is_ready()
        outgrown.arena.hurry()
        assert outgrown.arena.wait_ready(timeout_s=DEADLINE_S)
    outgrown.close()


def test_large_slots_that_cannot_be_unpinned_stay_and_new_ones_are_made(
    fake: FakeDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outgrown = Outgrown(fake, tmp_path)
    outgrown.gate.set()
    stays, goes = outgrown.arena.slots
    fake.registrations.stuck = {stays.address}
    outgrown.allocate(20 * MIB)
    assert outgrown.arena.wait_ready(timeout_s=DEADLINE_S)
    assert not stays.memory.closed
    assert goes.memory.closed
    assert outgrown.resident() == [10, 0, 20, 20]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
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
    recorder = PinnedRecorder(fake, state, limits=limits, pinner=pinner, state_bytes=64 << 10)
    assert all(slot.pins is not None for slot in recorder.arena.slots)
    recorder.take(place)
    recorder.update(["plain", "turned"], 9)
    recorder.finish()


@pytest.mark.parametrize("seed", range(15))
def test_random_states_are_copied_to_slots_pinned_by_the_page(seed: int, tmp_path: Path) -> None:
    fake, draw = FakeDevice(Seeded(seed)), random.Random(seed)
    state = State(fake)
    for number in range(draw.randrange(1, 10)):
        values = random_values(draw)
        if values.numel() and draw.random() < 0.7:
            values = values.repeat(draw.randrange(1, 300), *[1] * (max(values.dim(), 1) - 1))
            values = values.transpose(0, -1) if draw.random() < 0.5 else values
        state.add(f"t{number}", values, settled=draw.random() < 0.6)
    limits = draw.choice([TINY, Limits(reserve_bytes=0), Limits(8, 24, 3000, 5000, 0)])
    pinner = pinner_of(fake, tmp_path)
    recorder = PinnedRecorder(fake, state, limits=limits, pinner=pinner, state_bytes=400 << 10)
    for step in range(3):
        recorder.update(sorted(state.settled), step % 2)
        recorder.take(draw.choice(list(SnapshotPlace)))
        fake.run_some()
    recorder.finish()


def test_a_slot_of_which_a_part_stayed_pinned_takes_copies_too(
    fake: FakeDevice, tmp_path: Path
) -> None:
    """Unpinning after a failure failed: a copy may not leave the piece that remains."""
    fake.registrations.fail_at = 3
    fake.registrations.before = lambda address: fake.registrations.stuck.add(address)
    state = state_across_borders(fake)
    pinner = pinner_of(fake, tmp_path)
    recorder = PinnedRecorder(fake, state, pinner=pinner, state_bytes=64 << 10)
    assert 0 < fake.registrations.num_bytes < recorder.arena.slot_bytes
    recorder.take()
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
