"""Copies into live tensors on a device: their order, their memory, and what is left of failures."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.restore import pinned_ring
from checkfreq.restore.device_target import DeviceTransfers
from checkfreq.restore.pinned_ring import (
    BUFFERS_PER_THREAD,
    MAX_RING_BYTES,
)
from checkfreq.store.boxes import Box
from checkfreq.types import PAGE_BYTES
from tests.restore.device_filling import (
    Idle,
    bytes_of,
    fill,
    held,
    restore,
    target_of,
    transfers,
    zeros_on,
)
from tests.restore.shared_device import SharedDevice
from tests.snapshot.fake_device import Chooser, FakeDevice, Scripted, Seeded, every_schedule
from tests.snapshot.fake_streams import Kind

CUDA = torch.device("cuda", 0)
SEEDS = range(12)
DEADLINE_S = 120.0
#: More pieces than there are buffers, so that each is used again.
ROUNDS = BUFFERS_PER_THREAD + 2


# ---- what the copies come after, and what comes after them


@pytest.mark.parametrize("strided", [False, True])
def test_every_order_of_streams_gives_the_saved_bytes(strided: bool) -> None:
    saved = bytes_of(4 if strided else ROUNDS)

    def scenario(chooser: Chooser) -> None:
        fake = FakeDevice(chooser, eager_events=True)
        turned = torch.zeros(2, 2, dtype=torch.uint8).t()
        live = fake.tensor(turned) if strided else zeros_on(fake, ROUNDS)
        fake.training_writes(live, 5)
        restore(fake, {"live": live}, {"live": saved}, piece_bytes=2 if strided else 1)
        assert held(live) == saved
        fake.run_all()
        assert held(live) == saved

    assert every_schedule(scenario) > 10


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("seed", SEEDS)
def test_copies_come_between_what_was_queued_before_and_what_is_queued_next(
    kind: Kind, seed: int
) -> None:
    fake = FakeDevice(Seeded(seed))
    if kind is not Kind.DEFAULT:
        fake.use_new_stream(kind=kind)
    live, saved = zeros_on(fake, 20), bytes_of(20)
    fake.training_writes(live, 5)
    with transfers(fake, [live]) as opened:
        fill(opened, live, saved[:10], piece_bytes=3)
    fake.training_writes(live[10:], 7)
    fake.run_all()
    assert held(live) == saved[:10] + bytes([7] * 10)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_tensors_and_pieces(seed: int) -> None:
    chosen = random.Random(seed)
    fake = FakeDevice(Seeded(seed))
    live = {str(n): fake.tensor(_random_tensor(chosen)) for n in range(4)}
    wanted = {name: _random_values(tensor, seed) for name, tensor in live.items()}
    for tensor in live.values():
        fake.training_writes(tensor, 1)
    saved = {name: held(values) for name, values in wanted.items()}
    restore(fake, live, saved, piece_bytes=16 * chosen.randint(1, 40))
    assert {name: held(tensor) for name, tensor in live.items()} == saved


def _random_tensor(chosen: random.Random) -> Tensor:
    """Of any dtype and order of dimensions; some without elements, or with no dimension."""
    dtype = chosen.choice(
        [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
    )
    shape = [chosen.choice([0, 1, 2, 3, 5]) for _ in range(chosen.randint(0, 3))]
    order = chosen.sample(range(len(shape)), len(shape))
    return torch.zeros(shape, dtype=dtype).permute(order)


def _random_values(like: Tensor, seed: int) -> Tensor:
    bits = bytes_of(like.numel() * like.element_size() + 1, seed=seed)
    count = like.numel()
    flat = torch.frombuffer(bytearray(bits), dtype=torch.uint8)[:-1]
    if like.dtype is torch.bool:
        return (flat % 2).bool().reshape(like.shape)
    return flat.view(like.dtype)[:count].reshape(like.shape)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_parts_of_random_chunks(seed: int) -> None:
    """As a shard is filled from the chunks that other ranks have written."""
    chosen = random.Random(seed)
    fake = FakeDevice(Seeded(seed))
    shape = tuple(chosen.randint(1, 5) for _ in range(chosen.randint(1, 3)))
    begins = [chosen.randrange(size) for size in shape]
    sizes = [chosen.randint(1, size - at) for size, at in zip(shape, begins, strict=True)]
    part = Box(tuple(begins), tuple(sizes))
    chunk = torch.arange(Box.whole(shape).num_elements, dtype=torch.int16).view(shape)
    live = fake.tensor(_in_other_order(torch.zeros(sizes, dtype=torch.int16), chosen))
    fake.training_writes(live, -1)
    first, end = (2 * number for number in part.span_in(shape))
    with transfers(fake, [live]) as opened:
        target = opened.target(live, part=part, shape=shape, dtype=torch.int16)
        saved, size = held(chunk), 2 * chosen.randint(1, 30)
        for at in range(first, end, size):
            view = opened.ring.take()
            piece = saved[at : min(at + size, end)]
            view[: len(piece)] = piece
            wait = target.put(at, view[: len(piece)])
            assert wait is not None
            opened.ring.give(view, [wait])
    wanted = chunk[tuple(slice(at, at + n) for at, n in zip(begins, sizes, strict=True))]
    assert torch.equal(live, wanted)


def _in_other_order(tensor: Tensor, chosen: random.Random) -> Tensor:
    """The same shape, with dimensions in another order in memory."""
    order = chosen.sample(range(tensor.dim()), tensor.dim())
    turned = tensor.permute(order).contiguous()
    return turned.permute([order.index(dim) for dim in range(tensor.dim())])


#: Signalling NaNs and subnormals, as numbers of 16 bits.
ODD_BITS = torch.tensor([0x7F81, 0x7FBF, 0x0001, 0x8000], dtype=torch.uint16)


@pytest.mark.parametrize("change", ["conj", "neg", "expand", "odd bits"])
def test_views_that_are_not_their_memory_get_the_saved_values(change: str) -> None:
    fake = FakeDevice(Seeded(0))
    values = torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex64)
    live = fake.tensor(torch.zeros(1, 2, dtype=torch.complex64))
    if change == "expand":
        live, values = live.expand(3, 2), values.expand(3, 2)
    elif change == "odd bits":
        live, values = fake.tensor(torch.zeros(2, 2, dtype=torch.bfloat16).t()), ODD_BITS
    else:
        live = live.conj() if change == "conj" else torch._neg_view(live)
    restore(fake, {"": live}, {"": held(values)}, piece_bytes=8)
    assert held(live) == held(values)


# ---- memory


def test_the_ring_is_all_the_host_memory_and_is_unpinned_at_the_end() -> None:
    fake = FakeDevice(Seeded(0))
    live, saved = zeros_on(fake, 20 * PAGE_BYTES), bytes_of(20 * PAGE_BYTES)
    pinned: list[int] = []
    fake.registrations.before_undo = lambda address: pinned.append(fake.registrations.num_bytes)
    with transfers(fake, [live]) as opened:
        fill(opened, live, saved, piece_bytes=PAGE_BYTES)
        assert fake.registrations.num_bytes == opened.ring.num_bytes
    assert held(live) == saved
    assert pinned == [BUFFERS_PER_THREAD * 2 * PAGE_BYTES]
    assert fake.registrations.num_bytes == 0
    assert len(fake.returned) == 1


@pytest.mark.parametrize("read_bytes", [4 << 10, 8 << 20])
@pytest.mark.parametrize("num_threads", [1, 40])
def test_buffers_of_any_number_of_threads_are_below_64_mib(
    num_threads: int, read_bytes: int
) -> None:
    fake = SharedDevice(0)
    everybody = threading.Barrier(num_threads)
    with DeviceTransfers(fake, [], read_bytes=read_bytes) as opened:
        ring = opened.ring

        def hold_some() -> None:
            mine = [ring.take()]
            everybody.wait(DEADLINE_S)
            ring.give(mine.pop())

        with ThreadPoolExecutor(num_threads) as pool:
            for done in [pool.submit(hold_some) for _ in range(num_threads)]:
                done.result(DEADLINE_S)
        assert fake.registrations.num_bytes == ring.num_bytes < 64 << 20
        share = BUFFERS_PER_THREAD * ring.buffer_bytes
        assert ring.num_bytes == min(num_threads, MAX_RING_BYTES // share) * share
        assert (opened.buffers is ring) == (read_bytes <= 1 << 20)
    assert fake.registrations.num_bytes == 0


def test_a_thread_reads_into_one_buffer_while_copies_from_others_are_queued() -> None:
    """This device runs only while the host waits for it."""
    fake = FakeDevice(Scripted())
    live, saved = zeros_on(fake, 2), bytes_of(2)
    with transfers(fake, [live]) as opened:
        fill(opened, live, saved, piece_bytes=1)
        opened.ring.give(opened.ring.take())
        assert held(live) == bytes(2)
    assert held(live) == saved


def test_memory_that_cannot_be_pinned_is_copied_from_too() -> None:
    fake = FakeDevice(Seeded(0))
    fake.registrations.fail_at = 1
    live, saved = zeros_on(fake, 30), bytes_of(30)
    restore(fake, {"": live}, {"": saved}, piece_bytes=4)
    assert held(live) == saved
    assert fake.registrations.calls == ["register"]


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_lie_in_other_memory_go_through_the_ring(readonly: bool, seed: int) -> None:
    fake = FakeDevice(Seeded(seed))
    count = 5 * PAGE_BYTES + 100
    live, saved = zeros_on(fake, count), bytes_of(count)
    data = bytearray(saved)
    with transfers(fake, [live]) as opened:
        view = memoryview(data).toreadonly() if readonly else memoryview(data)
        assert target_of(opened, live).put(0, view) is None
        data[:] = bytes(count)  # not needed any more
    assert held(live) == saved


# ---- failures


class Refusing(FakeDevice):
    """Refuses every call from one on."""

    refuses_from = 1 << 30

    def _call(self, name: str) -> None:
        super()._call(name)
        if self.num_calls >= self.refuses_from:
            raise RuntimeError("the device refuses")


@pytest.mark.parametrize("strided", [False, True])
def test_an_error_at_any_call_is_raised_after_all_copies_and_the_ring_is_given_back(
    strided: bool,
) -> None:
    num_failed = 0
    for fail_at in range(1, 100):
        fake = FakeDevice(Seeded(fail_at))
        live = fake.tensor(torch.zeros(4, 2, dtype=torch.uint8).t() if strided else _zeros(8))
        saved = bytes_of(8)
        fake.fail_at = fail_at
        if not _is_refused(fake, live, saved):
            break
        num_failed += 1
        assert fake.registrations.num_bytes == 0
        held_before = held(live)
        fake.run_all()
        assert held(live) == held_before, "a copy that nobody waited for"
        restore(fake, {"": live}, {"": saved}, piece_bytes=2)  # the next one is whole
        assert held(live) == saved
    assert num_failed > 10


def _is_refused(fake: FakeDevice, live: Tensor, saved: bytes) -> bool:
    """Whether the device's own error is raised; no other may be."""
    try:
        restore(fake, {"": live}, {"": saved}, piece_bytes=2)
    except RuntimeError as error:
        return str(error) == "the device refuses" or pytest.fail(str(error))
    return False


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def test_a_device_that_refuses_everything_keeps_what_its_copies_may_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for refuses_from in range(1, 40):
        fake = Refusing(Seeded(refuses_from))
        live, lost = zeros_on(fake, 6), len(pinned_ring._LOST)
        fake.refuses_from = refuses_from
        if not _is_refused(fake, live, bytes_of(6)):
            break
        is_kept = len(pinned_ring._LOST) > lost
        assert is_kept == (fake.registrations.num_bytes > 0)
        assert is_kept or fake.num_copies == 0 or _is_still(fake, live)
        fake.run_all()  # a copy from memory that was unpinned or freed would fail here
    assert "the device might still be reading from it" in caplog.text


def _is_still(fake: FakeDevice, live: Tensor) -> bool:
    before = held(live)
    fake.run_all()
    return held(live) == before


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_deadline_what_is_queued_next_still_comes_after_the_copies(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeDevice(Scripted())
    live, older = zeros_on(fake, 4), bytes_of(4, seed=1)
    with (
        pytest.raises(StateError, match=r"copying to cuda:0 did not finish within 1 s"),
        transfers(fake, [live], idle=Idle()) as opened,
    ):
        fill(opened, live, bytes_of(4), piece_bytes=2)
    assert fake.registrations.num_bytes > 0, "the device may still read from it"
    assert "the device might still be reading from it" in caplog.text
    fake._chooser = Seeded(seed)
    if seed % 2:
        restore(fake, {"": live}, {"": older})
        fake.run_all()
        assert held(live) == older
    else:
        fake.training_writes(live, 9)
        fake.run_all()
        assert held(live) == bytes([9] * 4)


def test_after_a_deadline_memory_is_kept_from_new_owners_until_the_copies_are_done() -> None:
    fake = FakeDevice(Scripted())
    live = zeros_on(fake, 4)
    with pytest.raises(StateError), transfers(fake, [live], idle=Idle()) as opened:
        fill(opened, live, bytes_of(4), piece_bytes=2)
    allocation = fake._allocation(live)
    assert allocation is not None
    assert allocation.kept_by
