"""What limits a checkpoint besides the disk: the bus, and whether there is room for it at all."""

from __future__ import annotations

import mmap
import shutil
import time
from pathlib import Path

import torch

from benchmarks.saving import synchronize
from checkfreq.snapshot.memory import available_host_bytes

_GIB = 2**30
_SPARE_BYTES = _GIB
_SLOTS = 2.1  # two, each with slack for state that grows
_ON_DISK = 2.1  # the checkpoint before is there until the next is committed


class Bus:
    """Copies within memory; with a GPU, from it into pinned memory and back."""

    def __init__(self, region_bytes: int, device: torch.device) -> None:
        self._device, self._region_bytes = device, region_bytes
        self._state = torch.ones(region_bytes, dtype=torch.uint8, device=device)
        on_device = device.type == "cuda"
        self._host = torch.ones(region_bytes, dtype=torch.uint8, pin_memory=on_device)

    def seconds(self, num_bytes: int) -> dict[str, float]:
        """``bus_s``, and with a GPU ``bus_back_s``, of so many bytes in pieces of the region."""
        there = {"bus_s": self._copied(self._host, self._state, num_bytes)}
        if self._device.type != "cuda":
            return there
        return {**there, "bus_back_s": self._copied(self._state, self._host, num_bytes)}

    def _copied(self, to: torch.Tensor, source: torch.Tensor, num_bytes: int) -> float:
        synchronize(self._device)
        began_s = time.perf_counter()
        for begin in range(0, num_bytes, self._region_bytes):
            length = min(self._region_bytes, num_bytes - begin)
            to[:length].copy_(source[:length], non_blocking=True)
        synchronize(self._device)
        return time.perf_counter() - began_s


def touched(num_bytes: int) -> memoryview:
    """Page-aligned memory that is there already."""
    pages = max(1, -(-num_bytes // mmap.PAGESIZE))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return memoryview(mmap.mmap(-1, pages * mmap.PAGESIZE, flags=flags))


def room_for(num_bytes: int, device: torch.device, folder: Path) -> str | None:
    """Why a state of ``num_bytes`` cannot be measured here; None if it can."""
    on_host = _SLOTS if device.type == "cuda" else 1 + _SLOTS
    host_bytes = available_host_bytes()
    if host_bytes is not None and host_bytes < on_host * num_bytes + _SPARE_BYTES:
        return _too_little("memory", on_host * num_bytes, host_bytes)
    if device.type == "cuda":
        device_bytes = torch.cuda.mem_get_info(device)[0]
        if device_bytes < num_bytes + _SPARE_BYTES:
            return _too_little("memory of the GPU", num_bytes, device_bytes)
    disk_bytes = shutil.disk_usage(folder).free
    if disk_bytes < _ON_DISK * num_bytes + _SPARE_BYTES:
        return _too_little("disk", _ON_DISK * num_bytes, disk_bytes)
    return None


def _too_little(what: str, needed: float, free: int) -> str:
    return (
        f"needs {(needed + _SPARE_BYTES) / _GIB:.1f} GiB of {what}, "
        f"and {free / _GIB:.1f} GiB are free"
    )
