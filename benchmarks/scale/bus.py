"""The speed of the bus without checkfreq: copies within memory, or to and from a GPU."""

from __future__ import annotations

import time

import torch


class Bus:
    """Copies within memory; with a GPU, from it into pinned memory and back."""

    def __init__(self, region_bytes: int, device: torch.device) -> None:
        self._device, self._region_bytes = device, region_bytes
        self._state = torch.ones(region_bytes, dtype=torch.uint8, device=device)
        on_device = device.type == "cuda"
        self._host = torch.ones(region_bytes, dtype=torch.uint8, pin_memory=on_device)

    def seconds(self, num_bytes: int) -> dict[str, float]:
        """``bus_s``, and with a GPU ``bus_back_s``, of that many bytes in pieces of the region."""
        there = {"bus_s": self._copied(self._host, self._state, num_bytes)}
        if self._device.type != "cuda":
            return there
        return {**there, "bus_back_s": self._copied(self._state, self._host, num_bytes)}

    def _copied(self, to: torch.Tensor, source: torch.Tensor, num_bytes: int) -> float:
        self._synchronize()
        began_s = time.perf_counter()
        for begin in range(0, num_bytes, self._region_bytes):
            length = min(self._region_bytes, num_bytes - begin)
            to[:length].copy_(source[:length], non_blocking=True)
        self._synchronize()
        return time.perf_counter() - began_s

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
