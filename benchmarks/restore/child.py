"""What the processes of `benchmarks.restore` do: write a checkpoint once, or restore it once."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.lab.rawio import PAGE, drop_from_cache, read_once
from benchmarks.lab.saver import Training
from benchmarks.lab.states import Block, adamw_training, fingerprint
from benchmarks.restore.arms import ARMS, WRITERS, leave_in_memory
from benchmarks.restore.memory import Group, PrivatePeak, Resident, forget_peak
from checkfreq.restore.buffers import new_buffer

#: How the disk is read at its full speed: by so many threads, each into its own piece of a buffer.
_THREADS, _READ_BYTES = 4, 1 << 20
#: A slot with its slack, relative to the state.
_SLOT = 1.1


@dataclass(frozen=True, slots=True)
class State:
    """The state to restore: ``num_bytes`` of parameters and AdamW moments in ``num_tensors``."""

    num_bytes: int
    num_tensors: int
    device: str


@dataclass(frozen=True, slots=True)
class Restored:
    """Seconds to restore; bytes of memory that it took beyond the live state, at its peak."""

    seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """A cgroup by its name, and the memory that it leaves, relative to the state."""

    group: str
    spare: float


Fingerprint = tuple[int, ...]


def write(state: State, format_name: str, folder: Path, answer: Connection) -> None:
    """Save a random state in a format; sends what `restore` must find."""
    training = random_training(state)
    WRITERS[format_name](training, folder)
    drop_from_cache(path for path in folder.rglob("*") if path.is_file())
    answer.send(fingerprint(training))


def leave(state: State, folder: Path, is_short: bool, answer: Connection) -> None:
    """Save the same random state, and die as a training that is killed: its worker stays."""
    training = random_training(state)
    leave_in_memory(training, folder, is_short=is_short)
    answer.send(fingerprint(training))
    os.kill(os.getpid(), signal.SIGKILL)


def random_training(state: State) -> Training:
    """The same random state in every process."""
    torch.manual_seed(0)
    return adamw_training(
        state.num_bytes, num_tensors=state.num_tensors, device=torch.device(state.device)
    )


def read_raw(folder: Path, answer: Connection) -> None:
    """Read the files of our checkpoint directly, into the same few MiB again and again."""
    paths = [path for path in folder.glob("step-*/*") if path.stat().st_size >= _READ_BYTES]
    drop_from_cache(paths)
    with new_buffer(_THREADS * _READ_BYTES) as view:
        direct = all(map(_accepts_direct, paths))
        seconds = sum(
            read_once(
                path,
                view,
                path.stat().st_size // PAGE * PAGE,  # direct reads are of whole pages
                direct=direct,
                threads=_THREADS,
                chunk_bytes=_READ_BYTES,
            )
            for path in paths
        )
    answer.send(Restored(seconds, 0))


def _accepts_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def restore(
    state: State,
    arm_name: str,
    folder: Path,
    shortage: Shortage | None,
    expected: Fingerprint,
    answer: Connection,
) -> None:
    """Restore once into a live state; with a shortage, in a cgroup that leaves that much beside it.

    Sends `Restored`, or the text of what went wrong.
    """
    arm, group = ARMS[arm_name], None
    if shortage is not None:
        group = Group.make(shortage.group)
        group.join()
    training = live_training(state)
    reader = arm.make(training, folder, is_short=shortage is not None)
    if group is not None and shortage is not None:
        spare = shortage.spare
        group.leave_only(int(state.num_bytes * (spare + _SLOT * arm.with_slot)))
    drop_from_cache(path for path in folder.rglob("*") if path.is_file())
    try:
        restored = _timed(lambda: reader.load(folder), state, maps_shared=arm.from_memory)
        if fingerprint(training) != expected:
            raise ValueError("the restored state differs from the saved one")
    except Exception as error:
        answer.send(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    else:
        answer.send(restored)
    reader.close()


def live_training(state: State) -> Training:
    """Parameters, and the moments that a first update makes, all of them touched; no gradients."""
    num_params = state.num_bytes // 3 // state.num_tensors // 4
    block = Block(4 * state.num_tensors, num_tensors=state.num_tensors, device=state.device)
    for part in block.parts:
        part.data = torch.full((num_params,), 0.5, device=state.device)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-6)
    for part in block.parts:
        optimizer.state[part] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.full_like(part, 0.25),
            "exp_avg_sq": torch.full_like(part, 0.125),
        }
    return Training(block, optimizer)


def _timed(load: Callable[[], None], state: State, *, maps_shared: bool) -> Restored:
    _synchronize(state)
    before = Resident.read()
    forget_peak()
    with PrivatePeak() if maps_shared else contextlib.nullcontext() as private:
        before_bytes = 0 if private is None else private.num_bytes
        began_s = time.perf_counter()
        load()
        _synchronize(state)
        seconds = time.perf_counter() - began_s
    after = Resident.read()
    if private is not None:
        return Restored(seconds, private.num_bytes - before_bytes)
    shared = max(0, after.shared - before.shared)
    return Restored(seconds, max(0, after.peak - before.now - shared))


def _synchronize(state: State) -> None:
    if state.device.startswith("cuda"):
        torch.cuda.synchronize()
