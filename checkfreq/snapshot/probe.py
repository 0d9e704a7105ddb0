"""Pins memory for the accelerator, if there is one, and prints one line of JSON about it.

It runs in a process of its own, since a driver may hang, and a context
takes memory of the device (checkfreq/doctor/accelerators.py).
"""

from __future__ import annotations

import json
import mmap
import time
from typing import Any

import torch

from checkfreq.snapshot.backends import BACKENDS
from checkfreq.snapshot.device import Device, DriverError


def probe(num_bytes: int) -> dict[str, Any]:
    """Torch's version, the accelerators, and what pinning ``num_bytes`` came to."""
    current = torch.accelerator.current_accelerator(check_available=True)
    backend = None if current is None else BACKENDS.get(current.type)
    told: dict[str, Any] = {"torch": str(torch.__version__), "devices": []}
    if current is None or backend is None:
        return told
    device = torch.device(current.type, torch.accelerator.current_device_index())
    source = backend.allocate(num_bytes, device)  # from here on it is in use
    told |= {
        "kind": current.type,
        "runtime": backend.runtime_version(),
        "devices": backend.names(),
        "num_bytes": num_bytes,
        **pinned(backend, source, num_bytes),
    }
    return told


def pinned(backend: Device, source: torch.Tensor, num_bytes: int) -> dict[str, Any]:
    """Pin memory, and copy ``source``, which is on a device, into it."""
    memory = mmap.mmap(-1, num_bytes)
    target = torch.frombuffer(memory, dtype=torch.uint8)
    target.zero_()
    start_s = time.perf_counter()
    problem = _register(backend, target.data_ptr(), num_bytes)
    pin_s = time.perf_counter() - start_s
    if problem is not None:
        return {"problem": str(problem), "code": problem.code}
    stream = backend.side_stream(source.device)
    backend.copy([(target, source)], stream=stream)  # the first one is slower
    before = backend.record(stream)
    backend.copy([(target, source)], stream=stream)
    after = backend.record(stream)
    backend.synchronize(after)
    return {"problem": "", "pin_s": pin_s, "copy_s": backend.elapsed_s(before, after)}


def _register(backend: Device, address: int, num_bytes: int) -> DriverError | None:
    backend.prepare_thread()
    return backend.register_host(address, num_bytes)


def main(num_bytes: int) -> None:
    """Print what `probe` tells."""
    print(json.dumps(probe(num_bytes)))
