"""Restores onto the fake device, with a reading thread that the test itself is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from checkfreq.restore.device_target import DeviceTarget, DeviceTransfers
from checkfreq.store.boxes import Box
from checkfreq.types import PAGE_BYTES
from tests.snapshot.fake_device import FakeDevice
from tests.snapshot.recorder import row_major_bytes


class Idle:
    """A clock that only a pause moves; nothing runs meanwhile, as on a device that hangs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


def transfers(
    fake: FakeDevice, tensors: Iterable[Tensor], *, idle: Idle | None = None
) -> DeviceTransfers:
    """For reads of a page. The device runs while the host pauses, unless a clock is ``idle``."""
    clock = idle or Idle()
    return DeviceTransfers(
        fake,
        tensors,
        read_bytes=PAGE_BYTES,
        timeout_s=1e9 if idle is None else 1.0,
        clock=clock,
        pause=clock.pause if idle else lambda seconds: fake.run_one(),
    )


def target_of(opened: DeviceTransfers, tensor: Tensor) -> DeviceTarget:
    """Where the bytes of a whole tensor go, row by row."""
    shape = tuple(tensor.shape)
    return opened.target(tensor, part=Box.whole(shape), shape=shape, dtype=tensor.dtype)


def fill(
    open_transfers: DeviceTransfers, target: Tensor, saved: bytes, *, piece_bytes: int
) -> None:
    """Read the bytes of a tensor piece by piece, and put each."""
    ring, place = open_transfers.ring, target_of(open_transfers, target)
    for at in range(0, len(saved), piece_bytes):
        piece = saved[at : at + piece_bytes]
        view = ring.take()
        view[: len(piece)] = piece
        wait = place.put(at, view[: len(piece)])
        ring.give(view, [] if wait is None else [wait])


def restore(
    fake: FakeDevice,
    tensors: Mapping[str, Tensor],
    saved: Mapping[str, bytes],
    *,
    piece_bytes: int = 1,
) -> None:
    """Fill all tensors."""
    with transfers(fake, tensors.values()) as opened:
        for name, tensor in tensors.items():
            fill(opened, tensor, saved[name], piece_bytes=piece_bytes)


def bytes_of(count: int, *, seed: int = 0) -> bytes:
    """Random bytes, none of which is what the tests fill memory with."""
    generator = torch.Generator().manual_seed(seed)
    return bytes(torch.randint(10, 70, (count,), generator=generator).tolist())


def zeros_on(fake: FakeDevice, count: int, index: int = 0) -> Tensor:
    """A live tensor `[count] uint8`."""
    return fake.tensor(torch.zeros(count, dtype=torch.uint8), index)


def held(tensor: Tensor) -> bytes:
    """What a tensor holds now, row by row."""
    return row_major_bytes(tensor)
