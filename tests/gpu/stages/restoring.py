"""A restore of 4 GiB onto the device: from the memory that a killed run left, and from the disk.

    python -m tests.gpu.stages.restoring [--dry]

The first process checkpoints and is killed. The second restores from what its worker holds, the
third from the same files, which are then in no cache; each compares every byte with the state as
the first one made it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.rawio import drop_from_cache
from benchmarks.lab.saver import Training
from benchmarks.restore.arms import Managed, leave_in_memory
from benchmarks.restore.child import State, live_training, random_training, read_raw
from tests.gpu.stages.lines import say, synchronize
from tests.gpu.stages.resuming import Stage, part
from tests.silence.training import start

_GIB = 2**30
_NUM_TENSORS = 64


def main() -> None:
    """Print the speed of each restore beside that of a raw read, and whether the bits are equal."""
    stage = Stage.begin()
    context = stage.processes("benchmarks.restore.child")
    gib = 1 / 32 if stage.is_dry else 4.0
    with part("restoring") as folder:
        state = State(int(gib * _GIB), _NUM_TENSORS, stage.device.type)
        chk_dir = folder / "chk"
        left = start(partial(leave, state), chk_dir, context=context)
        assert left.exit_code == -signal.SIGKILL, left.error or "it was not killed"
        for source in ("memory", "disk"):
            began = start(partial(restore, state, source), chk_dir, context=context)
            assert began.exit_code == 0, began.error
            say("restore", source=source, gib=gib, **began.result)


def leave(state: State, directory: str, kill: int) -> None:
    """Checkpoint, and be killed once that is durable."""
    leave_in_memory(random_training(state), Path(directory), is_short=True)
    os.kill(os.getpid(), signal.SIGKILL)


def restore(state: State, source: str, directory: str, kill: int) -> dict[str, Any]:
    """The figures of a restore; from the disk with those of a raw read before it."""
    figures: dict[str, Any] = {}
    if source == "disk":
        raw_s = _raw_read_s(Path(directory))
        figures |= _speed(state, raw_s, "raw_read_")
    live = live_training(state)
    kept_s = 60.0 if source == "memory" else 0.0
    reader = Managed(live, Path(directory), is_short=True, kept_s=kept_s)
    drop_from_cache(path for path in Path(directory).rglob("*") if path.is_file())
    synchronize(torch.device(state.device))
    began_s = time.perf_counter()
    reader.load(Path(directory))
    synchronize(torch.device(state.device))
    figures |= _speed(state, time.perf_counter() - began_s, "restore_")
    reader.close()
    return {**figures, "ok": _are_equal(live, random_training(state))}


def _speed(state: State, seconds: float, of: str) -> dict[str, float]:
    return {
        f"{of}s": round(seconds, 4),
        f"{of}gib_per_s": round(state.num_bytes / _GIB / seconds, 3),
    }


def _raw_read_s(folder: Path) -> float:
    here, there = multiprocessing.Pipe(duplex=False)
    read_raw(folder, there)
    seconds: float = here.recv().seconds
    return seconds


def _are_equal(one: Training, other: Training) -> bool:
    """Every bit of parameters and moments, compared where they are."""
    pairs = list(zip(_tensors(one), _tensors(other), strict=True))
    return len(pairs) == 4 * _NUM_TENSORS and all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs
    )


def _tensors(training: Training) -> list[torch.Tensor]:
    parts = list(training.model.parameters())
    moments = (value for part in parts for value in training.optimizer.state[part].values())
    return [*(part.detach() for part in parts), *moments]


if __name__ == "__main__":
    main()
