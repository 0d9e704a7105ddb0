"""The cost of checkpoints by size of the state and by number of tensors, beside hardware limits.

    python -m benchmarks.scale --gib 0.1 1 4 8 --folder /mnt/disk/scratch

``size``: float32 state of each ``--gib`` in 64 tensors, while training continues (matrix products
of about 0.3 s per GiB, on a GPU 0.05 s, and a write to every parameter). In each round one save,
one raw direct write of the same bytes and one copy over the bus come in random order, then a
restore and raw direct reads, also in random order. ``held_ms``: how long training stops, in the
call (alone: ``save_ms``) and at updates. ``added_ms``: by how much all iterations until durable
were longer. ``copy_s``: from the boundary to the complete snapshot. ``durable_s``: from the call to
the commit, of which ``persist_s`` is after the snapshot. ``restore_s``: verified, into live
tensors, bypassing the page cache. ``raw_write_s``, ``raw_read_s`` (into memory already in use) and
``raw_fresh_s`` (into new memory, as a restore must) are the limits of the disk; ``bus_s`` (a copy
in memory; from a GPU to pinned memory) and ``bus_back_s`` those of the bus. ``..._against_...``:
the time of the limit over ours, within a round; 1 is as fast. The first save goes into slots that
were waited for, and does everything else for the first time; it is reported separately.
``memory_gib``: ``trainer_gib``, its peak growth since before the manager, plus ``worker_gib``, the
worker's peak, with shared slots counted once; ``slots_gib``: slots × state. ``restore_peak_gib``:
the memory that a restore needs besides the state.

``tensors``: a state of ``--mib`` in each number of ``--tensors``: ``boundary_us``, a boundary and
an update of an AUTO manager with nothing due (after its first checkpoint, over batches without one:
their median, minimum and maximum), and the figures above.

``list``: ``held_ms`` of a list of so many numbers of one type in the state (``--lists``), beside
``mixed_held_ms`` of one whose last number is None, which cannot be packed.

Medians of ``--rounds`` rounds (above 1 GiB proportionally fewer, but two), with quartiles. A size
that does not fit into memory or onto the disk has a line with ``why_not``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.capacity import shortage
from benchmarks.lab.events import events
from benchmarks.lab.rawio import RawWriter
from benchmarks.lab.record import emit, median_ratio
from benchmarks.lab.rounds import Arm, Seconds, interleaved
from benchmarks.lab.saving import Work, sample, seconds_of, shown, spread
from benchmarks.lab.states import NUM_TENSORS, Block
from benchmarks.lab.usage import Usage, worker_pid
from benchmarks.peers import Training
from benchmarks.peers.ours import CheckFreq
from benchmarks.scale.bus import Bus
from benchmarks.scale.lists import measure_list
from benchmarks.scale.peak import Peak
from checkfreq import CFCheckpoint, CFManager

GIB, MIB = 2**30, 2**20
_SIZES_GIB = [0.1, 0.5, 1.0, 2.0, 4.0, 8.0]
_LEAST_SECONDS = 0.03
_SECONDS_PER_GIB = {"cpu": 0.3, "cuda": 0.05}
_REGION_BYTES = 256 * MIB
_SLOTS_WITHIN_S = 600.0
_FIRST_WITHIN_S = 30.0
_CLEAN_ITERATIONS = 2
_AT_RESTORE = ("restore_s", "raw_read_s", "raw_fresh_s")
_BATCHES, _MOST_BATCHES = 5, 40
#: The ratios by name: the time of the limit over ours.
_AGAINST = {
    "persist_against_raw": ("raw_write_s", "persist_s"),
    "durable_against_raw": ("raw_write_s", "durable_s"),
    "copy_against_bus": ("bus_s", "copy_s"),
    "restore_against_raw": ("raw_read_s", "restore_s"),
    "restore_against_fresh": ("raw_fresh_s", "restore_s"),
}


def main() -> None:
    """Print a line per size and per number of tensors."""
    args = _arguments()
    device = torch.device(args.device)
    for gib in args.gib:
        print(f"scale: {gib:g} GiB", file=sys.stderr, flush=True)
        _size(gib, device, args)
    for num_tensors in args.tensors:
        print(f"scale: {num_tensors} tensors", file=sys.stderr, flush=True)
        _tensors(num_tensors, device, args)
    for length in args.lists:
        measure_list(length, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--gib", type=float, nargs="*", default=_SIZES_GIB, help="sizes of state")
    add("--tensors", type=int, nargs="*", default=[10, 100, 1_000, 10_000], help="numbers of them")
    add("--lists", type=int, nargs="*", default=[], help="lengths of lists of numbers")
    add("--mib", type=float, default=16.0, help="size of the state of --tensors")
    add("--rounds", type=int, default=4, help="after the first save")
    add("--iterations", type=int, default=2_000, help="with nothing due")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--folder", type=Path, default=Path(), help="a folder on the disk to measure")
    return parser.parse_args()


def _size(gib: float, device: torch.device, args: argparse.Namespace) -> None:
    num_bytes = int(gib * GIB)
    gc.collect()  # the previous state is in reference cycles: free its memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    why_not = shortage(num_bytes, device, args.folder)
    if why_not is not None:
        setting = {"what": "size", "device": device.type, "gib": gib}
        emit("scale", folder=args.folder, **setting, why_not=why_not)
        return
    rounds = num_rounds(args.rounds, gib)
    seconds, memory = measured(num_bytes, NUM_TENSORS, rounds, device, args)
    _report("size", seconds, memory, device, args, rounds=rounds, gib=gib, tensors=NUM_TENSORS)


def num_rounds(asked: int, gib: float) -> int:
    """Above 1 GiB proportionally fewer, but two unless only one is requested."""
    return min(asked, max(2, round(asked / max(1.0, gib))))


def _tensors(num_tensors: int, device: torch.device, args: argparse.Namespace) -> None:
    num_bytes = int(args.mib * MIB)
    seconds, memory = measured(num_bytes, num_tensors, args.rounds, device, args)
    boundary_us = _boundaries(num_bytes, num_tensors, device, args)
    _report(
        "tensors",
        seconds,
        memory,
        device,
        args,
        rounds=args.rounds,
        mib=args.mib,
        tensors=num_tensors,
        **_boundary(boundary_us),
    )


def _boundary(batches_us: list[float]) -> dict[str, float]:
    """The figures of a boundary; none if every batch had a checkpoint."""
    if not batches_us:
        return {}
    figures = {"": statistics.median(batches_us), "_low": min(batches_us), "_high": max(batches_us)}
    return {f"boundary_us{end}": round(value, 2) for end, value in figures.items()}


# Measuring


def measured(
    num_bytes: int, num_tensors: int, rounds: int, device: torch.device, args: argparse.Namespace
) -> tuple[Seconds, dict[str, float]]:
    """Seconds of everything, a value per round; memory in bytes. Leaves nothing on disk."""
    block = Block(num_bytes, num_tensors=num_tensors, device=device)
    training = Training(block, torch.optim.SGD(block.parameters(), lr=0.1))
    work = _work(block.state_bytes(), device)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="scale-") as scratch:
        folder = Path(scratch)
        raw = RawWriter(folder / "raw", block.state_bytes(), source_bytes=_REGION_BYTES)
        with raw as writer:
            seconds, memory = _saves(block, training, folder, writer, rounds, work, device)
            restores, peak_bytes = _restores(training, folder, writer, rounds, work)
    return {**seconds, **restores}, {**memory, "restore_peak": peak_bytes}


def _work(num_bytes: int, device: torch.device) -> Work:
    seconds = _SECONDS_PER_GIB[device.type] * num_bytes / GIB
    return Work(max(_LEAST_SECONDS, seconds), device=device)


def _saves(
    block: Block,
    training: Training,
    folder: Path,
    writer: RawWriter,
    rounds: int,
    work: Work,
    device: torch.device,
) -> tuple[Seconds, dict[str, float]]:
    num_bytes = block.state_bytes()
    bus = Bus(min(num_bytes, _REGION_BYTES), device)
    memory = Memory()

    def change() -> None:
        block.change()
        memory.sample(saver)

    def save() -> dict[str, float]:
        figures = sample(saver, change, work, clean_iterations=_CLEAN_ITERATIONS)
        return {**figures, "copy_s": _copy_s(folder / "chk")}

    def raw() -> dict[str, float]:
        raw_write_s = writer.once()
        (folder / "raw").unlink()  # its space is needed for two checkpoints
        return {"raw_write_s": raw_write_s}

    arms: list[Arm] = [save, raw, lambda: bus.seconds(num_bytes)]
    with contextlib.closing(CheckFreq(folder / "chk", training)) as saver:
        saver.boundary(save=False)
        _wait_for_slots(saver._manager)
        return interleaved(arms, rounds=rounds + 1), memory.used(saver, num_bytes)


def _wait_for_slots(manager: CFManager) -> None:
    if not manager._pipeline._arena.wait_ready(timeout_s=_SLOTS_WITHIN_S):
        raise TimeoutError(f"no slots within {_SLOTS_WITHIN_S:.0f} s")


def _copy_s(folder: Path) -> float:
    return float(events(folder, "committed")[-1]["copy_s"])


def _restores(
    training: Training, folder: Path, writer: RawWriter, rounds: int, work: Work
) -> tuple[Seconds, float]:
    peaks: list[float] = []

    def restore() -> dict[str, float]:
        # closed before the next arm: from now on it creates its slots in the background
        with contextlib.closing(CheckFreq(folder / "chk", training)) as saver:
            peak = Peak()
            restore_s = seconds_of(saver.restore, work)
            peaks.append(peak.growth())
        return {"restore_s": restore_s}

    arms: list[Arm] = [
        restore,
        lambda: {"raw_read_s": writer.read_back()},
        lambda: {"raw_fresh_s": writer.read_back(fresh=True)},
    ]
    writer.once()  # a file of the same size, to be read
    return interleaved(arms, rounds=rounds), statistics.median(peaks)


def _boundaries(
    num_bytes: int, num_tensors: int, device: torch.device, args: argparse.Namespace
) -> list[float]:
    """Microseconds of a boundary and an update with nothing due: the median of each batch."""
    count = args.iterations // _BATCHES
    block = Block(num_bytes, num_tensors=num_tensors, device=device)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    chk = CFCheckpoint(model=block, optimizer=optimizer)
    with (
        tempfile.TemporaryDirectory(dir=args.folder, prefix="scale-") as scratch,
        CFManager(scratch, chk) as manager,
    ):
        _iterations_us(manager, count)
        _wait_for_slots(manager)
        _until_first_checkpoint(manager, count)
        return quiet_batches(
            lambda: statistics.median(_iterations_us(manager, count)),
            lambda: _num_begun(manager),
        )


def _until_first_checkpoint(manager: CFManager, count: int) -> None:
    until_s = time.perf_counter() + _FIRST_WITHIN_S
    while not _num_begun(manager) and time.perf_counter() < until_s:
        _iterations_us(manager, count)


def _num_begun(manager: CFManager) -> int:
    stats = manager.stats()
    return sum(stats[f"num_{what}"] for what in ("committed", "failed", "in_flight"))


def quiet_batches(
    batch: Callable[[], float],
    num_begun: Callable[[], int],
    *,
    wanted: int = _BATCHES,
    most: int = _MOST_BATCHES,
) -> list[float]:
    """The results of ``batch`` during which no checkpoint began, until there are enough."""
    quiet: list[float] = []
    for _ in range(most):
        before, value = num_begun(), batch()
        if num_begun() == before:
            quiet.append(value)
        if len(quiet) == wanted:
            break
    return quiet


def _iterations_us(manager: CFManager, count: int) -> list[float]:
    times_us = []
    for _ in range(max(1, count)):
        began_s = time.perf_counter()
        with manager.updating():
            pass
        manager.step()
        times_us.append((time.perf_counter() - began_s) * 1e6)
    manager.wait()
    return times_us


class Memory:
    """The growth of the trainer since this was created, and the worker's memory, in bytes."""

    def __init__(self) -> None:
        self._peak = Peak()
        self._worker = 0

    def sample(self, saver: CheckFreq) -> None:
        """Sample both processes."""
        self._peak.sample()
        self._worker = max(self._worker, Usage.of(worker_pid(saver._manager)).private)

    def used(self, saver: CheckFreq, num_bytes: int) -> dict[str, float]:
        """The peak of each, and the size of the slots."""
        slots = len(saver._manager._pipeline._arena.slots)
        trainer = self._peak.growth()
        return {
            "slots": slots * num_bytes,
            "trainer": trainer,
            "worker": self._worker,
            "memory": trainer + self._worker,
        }


# Reporting


def _report(
    what: str,
    seconds: Seconds,
    memory: Mapping[str, float],
    device: torch.device,
    args: argparse.Namespace,
    **setting: Any,
) -> None:
    emit(
        "scale",
        folder=args.folder,
        what=what,
        device=device.type,
        **setting,
        **figures(seconds),
        **{f"{name}_gib": round(value / GIB, 4) for name, value in memory.items()},
        memory_against_slots=round(memory["memory"] / memory["slots"], 4),
    )


def figures(seconds: Seconds) -> dict[str, Any]:
    """Medians after the first save, quartiles, ratios within a round, and the first save."""
    saves = {name: values for name, values in seconds.items() if name not in _AT_RESTORE}
    later = {name: values[1:] for name, values in saves.items()}
    later |= {name: seconds[name] for name in _AT_RESTORE if name in seconds}
    first = {f"first_{name}": saves[name][0] for name in ("held_s", "durable_s")}
    return {
        **shown({name: statistics.median(values) for name, values in later.items()}),
        **shown(first),
        **{
            name: round(median_ratio(later[limit], later[ours]), 3)
            for name, (limit, ours) in _AGAINST.items()
            if limit in later
        },
        **spread(later),
    }
