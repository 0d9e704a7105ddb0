"""Stall, overlap, pinning and exactness of snapshots from one device.

    python -m benchmarks.device --gib 1 --saves 5

``snapshots``, a line per place: AdamW training of ``--gib`` of state that is saved ``--saves``
times, the first one not counted. Nothing waits for the device while an iteration is queued.
``stall_ms``: the host's time in the boundary that saves and in entering the next update, the
median. ``waited_ms``: how long the update waited for the copy, on the device or on the host.
``copy_s``: from the boundary to the complete snapshot; ``overlap`` is the part of it that no update
waited for. ``exact`` of ``saves`` checkpoints have every bit of a clone that was taken on the
device at the boundary, although the state is written to as soon as the next update may begin.
``slots_s``: from the first boundary until the slots of host memory were faulted in and pinned.

``pinning``, with a GPU: ``pin_s`` and ``unpin_s`` of ``--gib`` of faulted host memory in pieces of
at most 1 GiB, by the driver alone.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import checkfreq
from benchmarks.lab.capacity import shortage
from benchmarks.lab.events import events
from benchmarks.lab.record import emit
from benchmarks.lab.saver import Training
from benchmarks.lab.saving import Work
from benchmarks.lab.states import NUM_TENSORS, adamw_training, write_to_all
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.pinning import PIECE_BYTES
from checkfreq.types import SnapshotPlace

_GIB = 2**30
_SLOTS_WITHIN_S = 600.0
_BEHIND_CYCLES = 20_000_000  # work in front of an update: it is queued when its boundary is passed


def main() -> None:
    """Print a line per place, and one of pinning."""
    args = _arguments()
    device, num_bytes = torch.device(args.device), int(args.gib * _GIB)
    # A device snapshot and the clones take as much as the state each.
    why_not = shortage(num_bytes, device, args.folder, on_device=4.0)
    if why_not is not None:
        raise SystemExit(f"{args.gib:g} GiB {why_not}: take a smaller --gib")
    about = {"device": device.type, "gib": args.gib}
    places = list(SnapshotPlace) if device.type == "cuda" else [SnapshotPlace.HOST]
    for place in places:
        figures = snapshots(num_bytes, device, place, saves=args.saves, folder=args.folder)
        emit("device", folder=args.folder, what="snapshots", **about, place=place.value, **figures)
    if device.type == "cuda":
        pin_s, unpin_s = pinning(num_bytes)
        emit("device", what="pinning", **about, pin_s=round(pin_s, 4), unpin_s=round(unpin_s, 4))


def snapshots(
    num_bytes: int, device: torch.device, place: SnapshotPlace, *, saves: int, folder: Path
) -> dict[str, Any]:
    """The figures of one place."""
    training = adamw_training(num_bytes, num_tensors=NUM_TENSORS, device=device)
    work = Work(0.05 * num_bytes / _GIB, device=device)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="device-") as scratch,
        _manager(scratch, training, place) as manager,
    ):
        slots_s = _seconds_to_slots(manager)
        found = [
            _one_save(manager, training, work, Path(scratch), device) for _ in range(saves + 1)
        ]
    later = found[1:]
    return {
        "saves": saves,
        "exact": sum(one["exact"] for one in later),
        "slots_s": round(slots_s, 4),
        "stall_ms": _median_ms(one["stall_s"] for one in later),
        "waited_ms": _median_ms(one["waited_s"] for one in later),
        "copy_s": round(statistics.median(one["copy_s"] for one in later), 5),
        "overlap": round(statistics.median(_overlap(one) for one in later), 4),
    }


def _manager(folder: str, training: Training, place: SnapshotPlace) -> CFManager:
    return CFManager(
        folder,
        CFCheckpoint(model=training.model, optimizer=training.optimizer),
        mode=CFMode.MANUAL,
        chk_freq=0,
        retention=KeepLast(1),
        config=CFConfig(snapshot_place=place),
    )


def _seconds_to_slots(manager: CFManager) -> float:
    began_s = time.perf_counter()
    manager.step()
    if not manager._pipeline._arena.wait_ready(timeout_s=_SLOTS_WITHIN_S):
        raise TimeoutError(f"no slots within {_SLOTS_WITHIN_S:.0f} s")
    return time.perf_counter() - began_s


def _one_save(
    manager: CFManager, training: Training, work: Work, folder: Path, device: torch.device
) -> dict[str, float]:
    """An update, a boundary that saves, an iteration, and an update that may have to wait."""
    with manager.updating():
        if device.type == "cuda":
            torch.cuda._sleep(_BEHIND_CYCLES)
        write_to_all(training)
    expected = _cloned(training)
    waited_s = manager._pipeline._snapshotter.device_wait_s
    began_s = time.perf_counter()
    manager.step()
    manager.save()
    boundary_s = time.perf_counter() - began_s
    work.compute()
    asked_s = time.perf_counter()
    with manager.updating():
        entering_s = time.perf_counter() - asked_s
        write_to_all(training)
    manager.wait()
    manager.step()
    on_device_s = manager._pipeline._snapshotter.device_wait_s - waited_s
    return {
        "stall_s": boundary_s + entering_s,
        "waited_s": on_device_s if device.type == "cuda" else entering_s,
        "copy_s": float(events(folder, "committed")[-1]["copy_s"]),
        "exact": _are_equal(expected, checkfreq.load(folder)),
    }


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    moments = state["optimizer"]["state"].values()
    return [*state["model"].values(), *(tensor for one in moments for tensor in one.values())]


def _cloned(training: Training) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in _tensors(training.state())]


def _are_equal(expected: Sequence[Tensor], loaded: dict[str, Any]) -> bool:
    found = _tensors(loaded)
    return len(found) == len(expected) and all(
        torch.equal(_bits(one), _bits(other)) for one, other in zip(found, expected, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _overlap(one: dict[str, float]) -> float:
    return max(0.0, 1.0 - one["waited_s"] / one["copy_s"])


def _median_ms(seconds: Any) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def pinning(num_bytes: int) -> tuple[float, float]:
    """Seconds to page-lock fresh, faulted host memory, and to unlock it."""
    torch.zeros(1, device="cuda")
    device = CudaDevice()
    with mmap.mmap(-1, num_bytes) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(anchor)
        ctypes.memset(address, 1, num_bytes)
        pieces = [
            (address + at, min(PIECE_BYTES, num_bytes - at))
            for at in range(0, num_bytes, PIECE_BYTES)
        ]
        began_s = time.perf_counter()
        problems = [device.register_host(at, size) for at, size in pieces]
        pinned_s = time.perf_counter()
        problems += [device.unregister_host(at) for at, _ in pieces]
        ended_s = time.perf_counter()
        del anchor
    if any(problems):
        raise SystemExit(f"pinning failed: {', '.join(map(str, filter(None, problems)))}")
    return pinned_s - began_s, ended_s - pinned_s


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--gib", type=float, default=1.0, help="size of the state")
    add("--saves", type=int, default=5, help="after the first one")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--folder", type=Path, default=Path(), help="a folder on the disk to write to")
    return parser.parse_args()
