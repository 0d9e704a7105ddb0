"""Runs a function in every process of a real process group, and merges what they captured."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkfreq.restore.apply import RestorePlan, prepare
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import Role, TensorSpec
from tests.fork_server import FORK_SERVER
from tests.restore.memory import MemoryReader
from tests.state.support import take

DEADLINE_S = 240.0


@dataclass(frozen=True)
class Record:
    """A file as a manifest has it, and its bytes."""

    name: str
    tensors: tuple[TensorSpec, ...]
    image: bytes

    @property
    def num_bytes(self) -> int:
        """Length of the file."""
        return len(self.image)


@dataclass(frozen=True)
class Part:
    """What one rank contributes to a checkpoint."""

    rank: int
    objects: dict[str, Any]
    own: dict[str, Any]
    files: tuple[Record, ...]


@dataclass(frozen=True)
class Manifest:
    """What all ranks contributed, merged."""

    objects: dict[str, Any]
    ranks: dict[int, dict[str, Any]]
    files: tuple[Record, ...]

    @classmethod
    def merged(cls, parts: Sequence[Part]) -> Manifest:
        """One checkpoint of all parts; the leader's objects."""
        return cls(
            {name: json for part in parts for name, json in part.objects.items()},
            {part.rank: part.own for part in parts},
            tuple(file for part in parts for file in part.files),
        )

    def loaded(self, names: set[str] | None = None) -> FoundCheckpoint:
        """As if on disk: with all files, or only ``names`` in this rank's directory."""
        data = {
            file.name: memoryview(bytearray(file.image))
            for file in self.files
            if names is None or file.name in names
        }
        files = tuple(file for file in self.files if file.name in data)
        return FoundCheckpoint(replace(self, files=files), (), MemoryReader(data))


def part(chk: CFCheckpoint, role: Role, **kwargs: Any) -> Part:
    """A rank's part of a checkpoint taken now."""
    shot = take(chk, role=role, **kwargs)
    files = tuple(
        Record(file.name, tuple(file.tensors), bytes(shot.data[file.name]))
        for file in shot.found.manifest.files
    )
    own = json.loads(json.dumps(shot.captured.rank_objects))
    return Part(role.rank, dict(shot.found.manifest.objects), own, files)


def restored(
    chk: CFCheckpoint, manifest: Manifest, rank: int, names: set[str] | None = None, **kwargs: Any
) -> RestorePlan:
    """Restore from all files, or only those called ``names``."""
    plan = prepare(chk, manifest.loaded(names), path="chk/step-00000003", rank=rank, **kwargs)
    plan.apply()
    plan.apply_rng()
    return plan


def everyone(world: int, *, split: bool = False) -> list[Role]:
    """The roles of a run in one shared directory."""
    return [Role(rank, world, tuple(range(world)), split) for rank in range(world)]


def run_ranks(folder: Path, world: int, program: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``program(role, *arguments)`` in each of ``world`` processes; what each returned."""
    store = folder / f"store-{len(list(folder.iterdir()))}"
    store.touch()
    processes, pipes = [], []
    for role in everyone(world):
        pipe, theirs = FORK_SERVER.Pipe(duplex=False)
        process = FORK_SERVER.Process(
            target=_run, args=(role, str(store), theirs, program, arguments)
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(pipe)
    try:
        return [_result(pipe, rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join(DEADLINE_S)


def _result(pipe: Connection, rank: int) -> Any:
    assert wait([pipe], timeout=DEADLINE_S), f"rank {rank} said nothing for {DEADLINE_S} s"
    failed, value = pipe.recv()
    assert not failed, f"rank {rank}:\n{value}"
    return value


def _run(
    role: Role, store: str, pipe: Connection, program: Callable[..., Any], arguments: Any
) -> None:
    faulthandler.dump_traceback_later(DEADLINE_S / 2)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, role.world),
            rank=role.rank,
            world_size=role.world,
            timeout=timedelta(seconds=DEADLINE_S / 2),
        )
        value = program(role, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps((False, value)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
