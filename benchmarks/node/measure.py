"""Ranks of one machine that restore the same state: the bytes that they read, and the time.

    python -m benchmarks.node --mib 256 --ranks 2 4 --rounds 7 --folder /mnt/disk/scratch

A state of ``--mib``, replicated as under DDP, is saved once by ``torchrun`` processes (gloo), and
restored by a new manager of the same processes in every round, by each arm in random order:
``shared``, where each piece is read by one rank and handed to the others, and ``each for itself``,
the same code told that the state is too small to be shared. ``seconds``: the call of ``restore()``,
begun by all ranks together, of the slowest rank; ``read_mib``: what the kernel fetched from the
disk for all ranks together, in direct reads, which no cache answers; ``cpu_s``: processor time of
all ranks. Medians; ``low`` and ``high`` are quartiles of the seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, which its defaults would keep alive
from xxhash import xxh3_64_hexdigest

from benchmarks.lab.estimate import quartiles
from benchmarks.lab.record import emit, median_ratio
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from checkfreq.ranks import neighbours

SHARED, APART = "shared", "each for itself"
_TENSORS = 32
_CONFIG = CFConfig(keep_in_memory_s=0.0)

#: By arm, and by figure, the value of each round.
Figures = dict[str, dict[str, list[float]]]


def main() -> None:
    """Print a line per state, number of ranks and arm; in a child process, run one rank."""
    args = _arguments()
    if args.result is not None:
        _run_rank(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="node-") as scratch:
        for mib in args.mib:
            for world in args.ranks:
                _report(mib, world, args, launched(mib, world, args, Path(scratch)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=float, nargs="+", default=[64, 256], help="size of the state")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=7, help="after the first one; 2 or more")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # in a rank
    return parser.parse_args()


def launched(mib: float, world: int, args: argparse.Namespace, scratch: Path) -> Figures:
    """What ``world`` ranks measured."""
    result, folder = scratch / "result.json", scratch / "chk"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), "-m", "benchmarks.node", "--mib", str(mib)]
    command += ["--rounds", str(args.rounds), "--folder", str(folder), "--result", str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    shutil.rmtree(folder)
    figures: Figures = json.loads(result.read_text())
    return figures


def _report(mib: float, world: int, args: argparse.Namespace, figures: Figures) -> None:
    apart_s = figures[APART]["seconds"]
    for arm, found in figures.items():
        low, high = quartiles(found["seconds"])
        emit(
            "node",
            folder=Path(args.folder),
            arm=arm,
            mib=mib,
            ranks=world,
            rounds=args.rounds,
            **{name: round(statistics.median(values), 4) for name, values in found.items()},
            low=round(low, 4),
            high=round(high, 4),
            against_apart=round(median_ratio(found["seconds"], apart_s), 3),
        )


# ---- in a rank


def _run_rank(args: argparse.Namespace) -> None:
    """Save, then restore by every arm in each round; rank 0 writes the figures to a file."""
    dist.init_process_group("gloo")
    figures: Figures = {SHARED: {}, APART: {}}
    smallest = {SHARED: 0, APART: sys.maxsize}
    folder, state = Path(args.folder), _state(args.mib[0])
    with _manager(folder, state) as manager:
        manager.save(wait=True)
    saved = _digest(state)
    dice = random.Random(0)  # the same order on every rank
    for number in range(args.rounds + 1):
        for arm in dice.sample(list(figures), len(figures)):
            neighbours.SMALLEST_BYTES = smallest[arm]
            found = _restored(folder, state, saved)
            for name, value in found.items() if number else ():
                figures[arm].setdefault(name, []).append(value)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(figures))
    dist.destroy_process_group()


def _state(mib: float) -> dict[str, torch.Tensor]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    num_elements = int(mib * 2**18) // _TENSORS
    return {f"t{n}": torch.rand(num_elements, generator=generator) for n in range(_TENSORS)}


def _digest(state: dict[str, torch.Tensor]) -> list[str]:
    return [xxh3_64_hexdigest(memoryview(tensor.numpy())) for tensor in state.values()]


def _manager(folder: Path, state: dict[str, torch.Tensor]) -> CFManager:
    chk = CFCheckpoint(state=state)
    return CFManager(folder, chk, mode=CFMode.MANUAL, chk_freq=0, config=_CONFIG)


def _restored(folder: Path, state: dict[str, torch.Tensor], saved: list[str]) -> dict[str, float]:
    """What a restore took, of all ranks. ValueError if it brought other bits than were saved."""
    for tensor in state.values():
        tensor.zero_()
    with _manager(folder, state) as manager:
        dist.barrier()
        read_bytes, cpu_s, began_s = _read_bytes(), time.process_time(), time.perf_counter()
        manager.restore()
        seconds = time.perf_counter() - began_s
        own = (seconds, (_read_bytes() - read_bytes) / 2**20, time.process_time() - cpu_s)
    if _digest(state) != saved:
        raise ValueError("expected the saved bits")
    return _of_all(own)


def _of_all(own: Sequence[float]) -> dict[str, float]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    seconds, read_mib, cpu_s = zip(*everyone, strict=True)
    return {"seconds": max(seconds), "read_mib": sum(read_mib), "cpu_s": sum(cpu_s)}


def _read_bytes() -> int:
    """What the kernel has fetched from storage for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
