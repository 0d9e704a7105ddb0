"""This machine: versions, copies from the device, pinning as slots are pinned, and the disk.

``copies``: GiB/s from the device to host memory that is pageable, that the driver allocated, and
that is a slot's (a memfd, registered). ``registering``: seconds per GiB until a slot has its pages,
those of the driver for it, and the longest time between two launches of a thread that launches all
the time: alone, and while the driver works.
"""

from __future__ import annotations

import platform
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch

from benchmarks.lab.rawio import RawWriter, drop_from_cache
from checkfreq import CFConfig
from checkfreq.pacing.environment import cpu_model
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.memory import available_host_bytes
from checkfreq.snapshot.pin_failures import Machine
from checkfreq.snapshot.pinning import PIECE_BYTES, DevicePinner
from tests.gpu.stages.lines import is_dry, say, scratch, synchronize

_GIB = 2**30
_MIB = 2**20
_PATIENCE_S = 60.0
#: Copies to a slot are to be at least this fast, beside those to memory of the driver's.
_AS_FAST = 0.8


def main() -> None:
    """Print all of it."""
    dry = is_dry()
    device = torch.device("cpu" if dry else "cuda")
    num_bytes = 16 * _MIB if dry else PIECE_BYTES
    say("versions", **versions(dry))
    copies_and_pinning(device, num_bytes)
    disk(num_bytes)


def versions(dry: bool) -> dict[str, object]:
    """Of the software and the card; no name of the machine."""
    machine, host_bytes = Machine.here(), available_host_bytes()
    about: dict[str, object] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip,
        "numpy": numpy.__version__,
        "driver": machine.driver,
        "kernel": machine.kernel,
        "cpu": f"{cpu_model()}, {torch.get_num_threads()} threads",
        "host_gib": None if host_bytes is None else round(host_bytes / _GIB, 1),
        "dev_shm_gib": round(shutil.disk_usage("/dev/shm").total / _GIB, 1),
    }
    if not dry:
        card = torch.cuda.get_device_properties(0)
        about |= {"card": card.name, "card_gib": round(card.total_memory / _GIB, 1)}
    return about


def disk(num_bytes: int) -> None:
    """GiB/s of four threads, directly, of a file that is synced, and that is in no cache."""
    with scratch() as folder:
        path = Path(folder) / "raw"
        with RawWriter(path, num_bytes, source_bytes=256 * _MIB) as writer:
            for _ in range(2):
                write_s = writer.once()
                drop_from_cache([path])
                read_s = writer.read_back()
                speeds = {"write": num_bytes / _GIB / write_s, "read": num_bytes / _GIB / read_s}
                say("disk", gib=num_bytes / _GIB, **_rounded(speeds), direct=writer.direct)


def copies_and_pinning(device: torch.device, num_bytes: int) -> None:
    """Copies to each kind of memory; the slot is pinned in between."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    speeds = {"pageable": _gib_per_s(torch.zeros(num_bytes, dtype=torch.uint8), source)}
    allocated = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    speeds["cudaHostAlloc"] = _gib_per_s(allocated, source)
    arena = Arena(config=CFConfig(num_slots=1, arena_slack=0.0))  # faulted in, and not pinned
    began_s = time.perf_counter()
    arena.allocate(num_bytes)
    if not arena.wait_ready(timeout_s=_PATIENCE_S):
        raise SystemExit(f"no slot within {_PATIENCE_S:.0f} s")
    fault_in_s = time.perf_counter() - began_s
    (slot,) = arena.slots
    registering(slot, device, fault_in_s=fault_in_s)
    in_slot = torch.frombuffer(slot.memory, dtype=torch.uint8, count=num_bytes)
    speeds["memfd, registered"] = _gib_per_s(in_slot, source)
    ratio = speeds["memfd, registered"] / speeds["cudaHostAlloc"]
    say("copies", gib=num_bytes / _GIB, **_rounded(speeds))
    say("copies to a slot", against_cudaHostAlloc=round(ratio, 3), ok=_is_so(ratio, device))
    del in_slot
    arena.close()


def _is_so(ratio: float, device: torch.device) -> bool:
    return ratio >= _AS_FAST or device.type == "cpu"


def _gib_per_s(target: torch.Tensor, source: torch.Tensor) -> float:
    def once() -> float:
        synchronize(source.device)
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(source.device)
        return time.perf_counter() - began_s

    once()
    return source.numel() / _GIB / statistics.median(once() for _ in range(3))


def registering(slot: Slot, device: torch.device, *, fault_in_s: float) -> None:
    """Pin a slot while the training thread launches."""
    alone_ms = longest_gap_ms(device, lambda: time.sleep(0.3))

    def pin() -> None:
        pinner = DevicePinner(CudaDevice())
        never = threading.Event()
        slot.pins = pinner.pin(slot.address, slot.num_bytes, hurry=never, stop=never)

    meanwhile_ms = longest_gap_ms(device, pin)
    gib = slot.num_bytes / _GIB
    per_gib = None if slot.pins is None else slot.pins.seconds / gib
    say(
        "registering",
        fault_in_s_per_gib=round(fault_in_s / gib, 4),
        s_per_gib=per_gib,
        longest_gap_alone_ms=alone_ms,
        longest_gap_ms=meanwhile_ms,
        ok=slot.pins is not None or device.type == "cpu",
    )


def longest_gap_ms(device: torch.device, meanwhile: Callable[[], None]) -> float:
    """Between two launches, while another thread does something."""
    one = torch.zeros(1, device=device)
    one.add_(1)
    synchronize(device)
    thread = threading.Thread(target=meanwhile)
    thread.start()
    longest_s, last_s = 0.0, time.perf_counter()
    while thread.is_alive():
        one.add_(1)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    synchronize(device)
    return round(longest_s * 1e3, 3)


def _rounded(speeds: dict[str, float]) -> dict[str, float]:
    return {f"{name}, GiB/s": round(speed, 3) for name, speed in speeds.items()}


if __name__ == "__main__":
    main()
