"""An engine on a real device whose copies can be made late, so that a missing wait shows.

A test queues work with `late` or `_sleep`, keeps what it expects in constants or in clones on the
device, and compares once all is done: no wait of the host may order anything in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from checkfreq.config import CFConfig
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.backends import UpdateStreams
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device import Event, Pair, Stream
from checkfreq.snapshot.device_copier import Limits
from checkfreq.snapshot.device_engine import DeviceEngine, Helper
from checkfreq.snapshot.engine import Copy, view_in_slot
from checkfreq.snapshot.pinning import DevicePinner
from checkfreq.types import SnapshotPlace

PLACES = pytest.mark.parametrize("place", list(SnapshotPlace))

LONG = 4_000_000_000  # cycles: about two seconds
SHORT = 20_000_000
LARGE = (4 << 20) // 4  # elements of a float32 tensor above every small limit
DEADLINE_S = 120.0

Tensors = dict[str, tuple[Tensor, bool]]


class LateDevice(CudaDevice):
    """Its streams sleep for so many cycles before a copy: side streams, or (``every``) all.

    ``fail_at``: the number of the copy that raises, from 1.
    """

    def __init__(
        self, *, copy: int = SHORT, pack: int = SHORT, every: bool = False, fail_at: int = 0
    ) -> None:
        super().__init__()
        self.copy_cycles, self.pack_cycles = copy, pack
        self.every = every
        self.fail_at = fail_at
        self.side: Any = None
        self.latest_on_side: Any = None
        self._num_copies = 0

    def side_stream(self, device: torch.device) -> Stream:
        self.side = super().side_stream(device)
        return self.side

    def record(self, stream: Stream) -> Event:
        event = super().record(stream)
        if stream is self.side:
            self.latest_on_side = event
        return event

    def copy(self, pairs: Sequence[Pair], *, stream: Stream) -> None:
        self._be_late(stream, self.copy_cycles)
        super().copy(pairs, stream=stream)

    def pack(self, targets: list[Tensor], sources: list[Tensor], *, stream: Stream) -> None:
        self._be_late(stream, self.pack_cycles)
        super().pack(targets, sources, stream=stream)

    def _be_late(self, stream: Stream, cycles: int) -> None:
        self._num_copies += 1
        if self._num_copies == self.fail_at:
            raise RuntimeError("the device refuses")
        if cycles and (self.every or stream is self.side):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)


class HeldHelper:
    """Runs what is submitted when the test says so, in the calling thread."""

    def __init__(self) -> None:
        self._tasks: list[Callable[[], None]] = []

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)

    def run(self) -> None:
        while self._tasks:
            self._tasks.pop(0)()

    def close(self, *, timeout_s: float) -> bool:
        self.run()
        return True


def look_at(engine: DeviceEngine, devices: Iterable[torch.device]) -> None:
    """Find out what is free on devices that are new, as a new layout does."""
    done = threading.Event()
    engine.look_at(devices)
    engine._helper.submit(done.set)
    if isinstance(engine._helper, HeldHelper):
        engine._helper.run()
    assert done.wait(DEADLINE_S)


class Bench:
    """An engine, an arena of two slots, and the copies of some named tensors."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        slot_bytes: int = 80 << 20,
        device: CudaDevice | None = None,
        helper: Helper | None = None,
    ) -> None:
        warm_up()
        self.streams = UpdateStreams()
        self.engine = DeviceEngine(
            device or CudaDevice(), limits=limits, helper=helper, streams=self.streams
        )
        config = CFConfig(host_memory_limit=1 << 32)
        self.arena = Arena(config=config, pinner=DevicePinner(CudaDevice()))
        self.arena.allocate(slot_bytes)
        assert self.arena.wait_ready(timeout_s=DEADLINE_S)
        self.errors: list[BaseException | None] = []
        self._looked_at: set[torch.device] = set()

    def take(
        self,
        tensors: Tensors,
        place: SnapshotPlace = SnapshotPlace.HOST,
        *,
        on_copied: Callable[[Taken], None] = lambda taken: None,
    ) -> Taken:
        """Begin a snapshot; ``on_copied`` gets it as soon as it is reported, before others may."""
        slot = self.arena.acquire()
        assert slot is not None
        copies, offset = [], 4096
        for name, (tensor, settled) in sorted(
            tensors.items(), key=lambda item: -item[1][0].element_size()
        ):
            num_bytes = tensor.numel() * tensor.element_size()
            copies.append(Copy(name, tensor.detach(), offset, num_bytes, settled))
            offset += num_bytes
        taken = Taken(copies, slot)
        devices = {tensor.device for tensor, _ in tensors.values() if tensor.is_cuda}
        if new := devices - self._looked_at:
            self._looked_at |= new
            look_at(self.engine, new)

        def report(error: BaseException | None) -> None:
            on_copied(taken)
            self.errors.append(error)

        self.engine.place = place
        self.engine.start(copies, slot, on_copied=report)
        return taken

    def update(self, tensors: Tensors, value: float, *, settled: bool | None = True) -> None:
        """Write to settled tensors (None: all) on the current stream, as an update does."""
        self.streams.note()
        assert self.engine.fence(timeout_s=0.0) == 0.0
        for tensor, is_settled in tensors.values():
            if settled in (None, is_settled):
                tensor.fill_(value)

    def finish(self) -> None:
        assert self.engine.wait_copied(timeout_s=DEADLINE_S)
        self.engine.close()
        assert all(error is None for error in self.errors), self.errors

    def close(self) -> None:
        self.engine.close()
        torch.cuda.synchronize()  # a failed test may leave copies into the slots
        self.arena.close()


class Taken:
    """A snapshot; its tensors are read from the slot."""

    def __init__(self, copies: list[Copy], slot: Slot) -> None:
        self.slot = slot
        self._forms = [(c.name, c.source.dtype, c.source.shape, c.offset) for c in copies]

    def __getitem__(self, name: str) -> Tensor:
        for known, dtype, shape, offset in self._forms:
            if known == name:
                like = torch.empty(shape, dtype=dtype)
                if not like.numel():
                    return like
                copy = Copy(name, like, offset, like.numel() * like.element_size(), False)
                return view_in_slot(copy, self.slot).clone()
        raise KeyError(name)

    def values(self) -> dict[str, set[float]]:
        """The least and the greatest value of each tensor: one, if it has no other."""
        return {name: _extremes(self[name]) for name, *_ in self._forms}


def _extremes(tensor: Tensor) -> set[float]:
    return set(torch.stack(tensor.aminmax()).tolist()) if tensor.numel() else set()


def warm_up() -> None:
    """Launch once what the tests launch: loading a kernel may wait for those that are running."""
    for num in (10, LARGE):
        one = torch.full((num,), 1.0, device="cuda")
        one.fill_(2).add_(1)
        other = torch.zeros_like(one)
        torch._foreach_copy_([other, one.clone()], [one, other], non_blocking=True)
        other.copy_(one * 2)
        torch.empty(num, pin_memory=True).copy_(one, non_blocking=True)
    turned = torch.ones(32, 16, device="cuda").t()
    torch.empty(16, 32, device="cuda").copy_(turned)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()


def same_bits(one: Tensor, other: Tensor) -> bool:
    plain = [t.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (one, other)]
    return torch.equal(plain[0].view(torch.uint8), plain[1].view(torch.uint8))


@contextmanager
def host_must_not_wait() -> Iterator[None]:
    """Fails if the block waits for the device; PyTorch's own check is on as well.

    An event behind a long sleep would have happened had anything waited for the device.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    behind = torch.cuda.Event()
    behind.record()
    torch.cuda.set_sync_debug_mode("error")  # warns that it does not find everything
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not behind.query(), "the host waited for the device"
