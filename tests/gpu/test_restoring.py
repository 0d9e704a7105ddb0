"""Restores into live tensors on a real device: their order, their bits, and what they leave behind.

Copies are late, or the work before them is. The host never waits between what is ordered, but for
the restore itself. tests/mutations removes each wait in turn.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import StateError
from checkfreq.restore import pinned_ring
from checkfreq.restore.device_target import DeviceTransfers
from checkfreq.restore.pinned_ring import BUFFERS_PER_THREAD, MAX_RING_BYTES
from checkfreq.snapshot import backends
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device import DriverError, Event
from tests.gpu.bench import (
    DEADLINE_S,
    LARGE,
    LONG,
    SHORT,
    LateDevice,
    same_bits,
    warm_up,
)
from tests.restore.device_filling import fill

#: Warnings of CUDA libraries and of PyTorch's own debug modes are not ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

PIECE = 1 << 20
#: So many pieces that each buffer is used several times.
MANY = 4 * BUFFERS_PER_THREAD * PIECE


@pytest.fixture(autouse=True)
def _ready() -> Iterator[None]:
    warm_up()
    yield
    torch.cuda.synchronize()


def into(device: CudaDevice, *tensors: Tensor, timeout_s: float = DEADLINE_S) -> DeviceTransfers:
    """Transfers with one reading thread, which the test is."""
    return DeviceTransfers(device, tensors, read_bytes=PIECE, timeout_s=timeout_s)


def random_bytes(count: int) -> Tensor:
    return torch.randint(0, 255, (count,), dtype=torch.uint8)


def restore(device: CudaDevice, live: Tensor, saved: Tensor, *, piece_bytes: int = PIECE) -> None:
    with into(device, live) as opened:
        fill(opened, live, bytes(saved.numpy()), piece_bytes=piece_bytes)


# ---- order


def test_a_restore_comes_after_the_work_that_was_queued_before_it() -> None:
    live, saved = torch.zeros(MANY, dtype=torch.uint8, device="cuda"), random_bytes(MANY)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * SHORT)
    live.fill_(5)
    restore(CudaDevice(), live, saved)
    assert same_bits(live, saved)


def test_a_buffer_is_not_used_again_before_it_was_copied() -> None:
    live, saved = torch.zeros(MANY, dtype=torch.uint8, device="cuda"), random_bytes(MANY)
    restore(LateDevice(), live, saved)
    assert same_bits(live, saved)


class Unpinned(LateDevice):
    """Notes whether all copies were done when memory was unpinned."""

    were_done: bool | None = None

    def unregister_host(self, address: int) -> DriverError | None:
        self.were_done = bool(self.latest_on_side.query())
        return super().unregister_host(address)


def test_the_ring_is_unpinned_after_the_copies() -> None:
    live, saved = torch.zeros(PIECE, dtype=torch.uint8, device="cuda"), random_bytes(PIECE)
    device = Unpinned(copy=LONG // 10)
    restore(device, live, saved)
    assert device.were_done
    assert same_bits(live, saved)


def test_after_a_deadline_what_is_queued_next_comes_after_the_copies() -> None:
    live, saved = torch.zeros(PIECE, dtype=torch.uint8, device="cuda"), random_bytes(PIECE)
    with (
        pytest.raises(StateError, match="did not finish"),
        into(LateDevice(copy=LONG), live, timeout_s=0.0) as opened,
    ):
        fill(opened, live, bytes(saved.numpy()), piece_bytes=PIECE)
    live.fill_(9)
    torch.cuda.synchronize()
    assert bool((live == 9).all())


def test_after_a_deadline_freed_memory_is_not_reused_on_its_stream_before_the_copies() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        live = [torch.zeros(4 * LARGE, dtype=torch.uint8, device="cuda")]
    torch.cuda.synchronize()
    _give_up_on(live[0])
    live.clear()
    gc.collect()
    with torch.cuda.stream(stream):
        others = [torch.full((LARGE,), 7.0, device="cuda") for _ in range(16)]
    torch.cuda.synchronize()
    assert all(bool((one == 7).all()) for one in others)


def _give_up_on(live: Tensor) -> None:
    """A restore whose copies come after its deadline; references to ``live`` go with the frame."""
    try:
        with into(LateDevice(copy=LONG // 10), live, timeout_s=0.0) as opened:
            fill(opened, live, bytes(2 * PIECE), piece_bytes=PIECE)
    except StateError:
        return
    raise AssertionError("the copies were not late")


def test_the_memory_of_late_copies_is_never_used_again() -> None:
    live, saved = torch.zeros(PIECE, dtype=torch.uint8, device="cuda"), random_bytes(PIECE)
    before = len(pinned_ring._LOST)
    with (
        pytest.raises(StateError),
        into(LateDevice(copy=LONG // 10), live, timeout_s=0.0) as opened,
    ):
        fill(opened, live, bytes(saved.numpy()), piece_bytes=PIECE)
    assert len(pinned_ring._LOST) == before + 1
    kept = torch.frombuffer(pinned_ring._LOST[-1], dtype=torch.uint8)
    assert kept[:4096].is_pinned()
    torch.cuda.synchronize()
    assert same_bits(live, saved)


def test_reading_goes_on_while_copies_are_under_way() -> None:
    """Neither putting a piece nor taking the next buffer waits for a copy."""
    count = (BUFFERS_PER_THREAD - 1) * PIECE
    live, saved = torch.zeros(count, dtype=torch.uint8, device="cuda"), random_bytes(count)
    device = LateDevice(copy=LONG // 2)
    with into(device, live) as opened:
        fill(opened, live, bytes(saved.numpy()), piece_bytes=PIECE)
        opened.ring.give(opened.ring.take())
        assert not device.latest_on_side.query(), "the host waited for a copy"
    assert same_bits(live, saved)


class Failing(LateDevice):
    """Raises instead of recording an event on the side stream, once."""

    record_fails = True

    def record(self, stream: object) -> Event:
        if stream is self.side and self.record_fails and self.latest_on_side is None:
            self.record_fails = False
            raise RuntimeError("the device refuses")
        return super().record(stream)


@pytest.mark.parametrize("device", [LateDevice(fail_at=2), Failing()], ids=["copy", "record"])
def test_a_failed_copy_is_raised_after_the_others_and_the_next_restore_is_whole(
    device: LateDevice,
) -> None:
    live, saved = torch.zeros(MANY, dtype=torch.uint8, device="cuda"), random_bytes(MANY)
    before = len(pinned_ring._LOST)
    with pytest.raises(RuntimeError, match="the device refuses"):
        restore(device, live, saved)
    assert len(pinned_ring._LOST) == before
    live.fill_(3)
    torch.cuda.synchronize()
    assert bool((live == 3).all())
    restore(CudaDevice(), live, saved)
    assert same_bits(live, saved)


# ---- bits


@pytest.mark.parametrize("piece_bytes", [4096, 3 * 4096, PIECE])
def test_strides_dtypes_and_odd_bits_arrive_in_live_tensors_as_they_are(piece_bytes: int) -> None:
    torch.manual_seed(0)
    half = torch.randint(-(1 << 15), 1 << 15, (512, 300), dtype=torch.int16)
    values = {
        "plain": torch.randn(300_000),
        "half": half.view(torch.float16),
        "turned half": half.view(torch.bfloat16).t(),
        "channels last": torch.randn(8, 16, 32, 32).to(memory_format=torch.channels_last),
        "column": torch.randn(5000, 3)[:, 1],
        "complex": torch.randn(40_000, dtype=torch.complex128),
        "bytes": random_bytes(1_000_003),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "bools": torch.rand(70, 90).t() > 0.5,
    }
    live = {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="cuda").fill_(0)
        for name, v in values.items()
    }
    with into(CudaDevice(), *live.values()) as opened:
        for name, tensor in live.items():
            flat = values[name].contiguous().reshape(-1).view(torch.uint8)
            fill(opened, tensor, bytes(flat.numpy()), piece_bytes=piece_bytes)
    assert [name for name in values if not same_bits(live[name], values[name])] == []


class Unpinnable(CudaDevice):
    def register_host(self, address: int, num_bytes: int) -> DriverError | None:
        return DriverError("cudaHostRegister", 801, "cudaErrorNotSupported")


def test_memory_that_cannot_be_pinned_is_copied_from_as_well() -> None:
    live, saved = torch.zeros(MANY, dtype=torch.uint8, device="cuda"), random_bytes(MANY)
    restore(Unpinnable(), live, saved)
    assert same_bits(live, saved)


# ---- whole restores


class Wide(nn.Module):
    """State of ``num`` x 64 MiB, and a strided tensor."""

    def __init__(self, num: int, *, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(16 << 20, device="cuda")) for _ in range(num)
        )
        turned = torch.randn(1024, 512, device="cuda").t()
        self.register_buffer("turned", turned)


def saved_on_disk(chk_dir: Path, num: int) -> dict[str, Tensor]:
    """A checkpoint of such a module; what it holds, on the host."""
    model = Wide(num, seed=1)
    with CFManager(chk_dir, CFCheckpoint(model=model), mode=CFMode.MANUAL, chk_freq=1) as manager:
        manager.restore()
        manager.step()
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def test_a_manager_restores_between_what_is_queued_before_and_after(tmp_path: Path) -> None:
    saved = saved_on_disk(tmp_path, 2)
    model = Wide(2, seed=2)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * SHORT)
    for parameter in model.parameters():
        parameter.data.fill_(5)
    with CFManager(tmp_path, CFCheckpoint(model=model)) as manager:
        assert manager.restore() is not None
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for parameter in model.parameters():
            parameter.data.fill_(6)
    assert [name for name in saved if not same_bits(found[name], saved[name])] == []


def test_load_into_a_module_on_the_device_fills_it_in_place(tmp_path: Path) -> None:
    saved = saved_on_disk(tmp_path, 1)
    model = Wide(1, seed=2)
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    checkfreq.load(tmp_path, into={"model": model})
    found = model.state_dict()
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == places
    assert [name for name in saved if not same_bits(found[name], saved[name])] == []


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def test_optimizer_state_that_does_not_exist_yet_is_filled_on_the_device(tmp_path: Path) -> None:
    model = Wide(1, seed=1)
    optimizer = stepped(model)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    with CFManager(tmp_path, chk, mode=CFMode.MANUAL, chk_freq=1) as manager:
        manager.restore()
        manager.step()
    new = Wide(1, seed=2)
    fresh = torch.optim.AdamW(new.parameters(), lr=0.1)
    checkfreq.load(tmp_path, into={"model": new, "optimizer": fresh})
    (state,), (expected,) = (one.state_dict()["state"].values() for one in (fresh, optimizer))
    assert state["exp_avg"].is_cuda
    assert [name for name in expected if not same_bits(state[name], expected[name])] == []


class Counting(CudaDevice):
    """Counts the host memory that it has pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[int, int] = {}
        self.most = 0

    def register_host(self, address: int, num_bytes: int) -> DriverError | None:
        self.pinned[address] = num_bytes
        self.most = max(self.most, sum(self.pinned.values()))
        return super().register_host(address, num_bytes)

    def unregister_host(self, address: int) -> DriverError | None:
        del self.pinned[address]
        return super().unregister_host(address)


@pytest.fixture
def counting() -> Iterator[Counting]:
    """The backend for the time of a test."""
    usual, device = backends.BACKENDS["cuda"], Counting()
    backends.register("cuda", device)
    yield device
    backends.register("cuda", usual)


def test_no_more_is_pinned_than_the_ring_and_nothing_afterwards(
    tmp_path: Path, counting: Counting
) -> None:
    saved = saved_on_disk(tmp_path, 4)
    counting.most = 0
    model = Wide(4, seed=2)
    checkfreq.load(tmp_path, into={"model": model})
    assert 0 < counting.most <= MAX_RING_BYTES
    assert counting.pinned == {}
    found = model.state_dict()
    assert [name for name in saved if not same_bits(found[name], saved[name])] == []
