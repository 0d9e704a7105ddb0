"""Slots on a real device: pinned in pieces, also during a capture, and copied to whole."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest
import torch

from checkfreq.config import CFConfig
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device import DriverError
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import Copy
from checkfreq.snapshot.pinning import DevicePinner, PinnedPieces
from checkfreq.types import SnapshotPlace
from tests.gpu.bench import DEADLINE_S, LARGE, PLACES, Taken, look_at, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]


def arena_on_device(device: CudaDevice | None = None) -> Arena:
    """One slot of 40 MiB, which a background thread pins in pieces of 1 MiB."""
    torch.zeros(1, device="cuda")
    config = CFConfig(num_slots=1, host_memory_limit=1 << 32)
    arena = Arena(config=config, pinner=DevicePinner(device or CudaDevice(), piece_bytes=1 << 20))
    arena.allocate(40 << 20)
    return arena


def ready_slot(arena: Arena) -> Slot:
    """The slot, pinned."""
    assert arena.wait_ready(timeout_s=DEADLINE_S)
    slot = arena.acquire()
    assert slot is not None
    assert slot.pins is not None
    return slot


def test_slots_are_pinned_in_pieces_and_given_back(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        arena = arena_on_device()
        slot = ready_slot(arena)
    assert slot.pins is not None
    assert slot.pins.num_bytes == slot.num_bytes
    assert slot.pins.seconds > 0
    assert [record.getMessage().split()[0] for record in caplog.records] == ["pinned"]
    memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
    assert all(memory[at : at + 4096].is_pinned() for at in range(0, slot.num_bytes, 1 << 20))
    assert slot.pins.release()
    assert not memory[:4096].is_pinned()
    del memory
    arena.close()
    torch.cuda.synchronize()


@PLACES
@pytest.mark.parametrize("has_room", [True, False], ids=["", "without room for buffers"])
def test_copies_into_many_pieces_arrive_whole(place: SnapshotPlace, has_room: bool) -> None:
    """Borders at every megabyte, and tensors of each kind across them."""
    arena = arena_on_device()
    slot = ready_slot(arena)
    tensors = {
        "plain": torch.randn(LARGE, device="cuda"),
        "wide": torch.randn(LARGE // 4, device="cuda", dtype=torch.complex128),
        "turned": torch.randn(1024, 2048, device="cuda").t(),
        "bytes": torch.randint(0, 255, (3_000_001,), device="cuda").to(torch.uint8),
        "small": torch.randn(10, device="cuda"),
    }
    copies, offset = [], 4096
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        num_bytes = tensor.numel() * tensor.element_size()
        copies.append(Copy(name, tensor, offset, num_bytes, name != "small"))
        offset += num_bytes
    engine = DeviceEngine(CudaDevice(), place=place)
    if has_room:  # an engine that has not looked knows of none
        look_at(engine, {torch.device("cuda", torch.cuda.current_device())})
    errors: list[BaseException | None] = []
    engine.start(copies, slot, on_copied=errors.append)
    assert engine.wait_copied(timeout_s=DEADLINE_S)
    engine.close()
    assert errors == [None]
    taken = Taken(copies, slot)
    assert all(same_bits(taken[name], tensor) for name, tensor in tensors.items())
    arena.close()


def test_a_copy_across_two_pieces_is_refused_or_whole() -> None:
    """Refused by the documentation of CUDA, and by our fake; it must not be torn silently."""
    arena = arena_on_device()
    slot = ready_slot(arena)
    target = torch.frombuffer(slot.memory, dtype=torch.uint8)[4096 : 4096 + (2 << 20)]
    source = torch.randint(0, 255, target.shape, device="cuda").to(torch.uint8)
    with contextlib.suppress(torch.AcceleratorError):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(target, source.cpu())
    del target
    arena.close()


class HeldDevice(CudaDevice):
    """Unpins nothing before ``gate`` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.gate = threading.Event(), threading.Event()

    def unregister_host(self, address: int) -> DriverError | None:
        self.begun.set()
        assert self.gate.wait(DEADLINE_S)
        return super().unregister_host(address)


def test_training_goes_on_while_slots_that_are_too_small_are_unpinned() -> None:
    device = HeldDevice()
    arena = arena_on_device(device)
    small = ready_slot(arena)
    arena.release(small)
    arena.allocate(80 << 20)
    assert device.begun.wait(DEADLINE_S)
    assert os.fstat(arena.slots[0].fd).st_blocks == 0, "the new one has no memory yet"
    live = torch.zeros(8, device="cuda")
    live.add_(1)
    torch.cuda.synchronize()
    assert not arena.is_ready()
    device.gate.set()
    large = ready_slot(arena)
    assert small.memory.closed
    memory = torch.frombuffer(large.memory, dtype=torch.uint8)
    assert all(memory[at : at + 4096].is_pinned() for at in range(0, large.num_bytes, 1 << 20))
    del memory
    arena.close()
    torch.cuda.synchronize()


def test_a_failed_pinning_leaves_no_error_behind(caplog: pytest.LogCaptureFixture) -> None:
    torch.zeros(1, device="cuda")
    pinner = DevicePinner(CudaDevice())
    assert pinner.pin(0, 4096, hurry=threading.Event(), stop=threading.Event()) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "HostRegister returned error" in record.getMessage()
    torch.ones(8, device="cuda").add_(1)  # would raise it
    torch.cuda.synchronize()


def test_a_failed_unpinning_is_reported_and_leaves_no_error_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.zeros(1, device="cuda")
    pieces = PinnedPieces(CudaDevice())
    pieces.add(1 << 30, 4096, seconds=0.0)  # never registered
    assert not pieces.release()
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "HostUnregister returned error" in record.getMessage()
    torch.ones(8, device="cuda").add_(1)
    torch.cuda.synchronize()


def test_memory_that_is_pinned_already_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    arena = arena_on_device()
    slot = ready_slot(arena)
    again = DevicePinner(CudaDevice()).pin(
        slot.address, slot.num_bytes, hurry=threading.Event(), stop=threading.Event()
    )
    assert again is None
    assert "712" in caplog.text
    arena.close()
