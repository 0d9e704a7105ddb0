"""A restore of 8 GiB onto the device: from the memory that a killed run left, and from the disk.

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
from tests.gpu.stages.resuming import Stage
from tests.silence.training import start

_GIB = 2**30
_NUM_TENSORS = 64


def main() -> None:
    """Print the speed of each restore beside that of a raw read, and whether the bits are equal."""
    stage = Stage.of_arguments("restoring")
    context = stage.processes("benchmarks.restore.child")
    gib = 1 / 32 if stage.is_dry else 8.0
    with stage.part("restoring") as folder:
        state = State(int(gib * _GIB), _NUM_TENSORS, stage.device)
        chk_dir = folder / "chk"
        left = start(partial(leave, state), chk_dir, context=context)
        assert left.exit_code == -signal.SIGKILL, left.error or "it was not killed"
        for source in ("memory", "disk"):
            began = start(partial(restore, state, source), chk_dir, context=context)
            assert began.exit_code == 0, began.error
            stage.say(source=source, gib=gib, **began.result)


def leave(state: State, directory: str, kill: int) -> None:
    """Checkpoint, and be killed once that is durable."""
    leave_in_memory(random_training(state), Path(directory), is_short=True)
    os.kill(os.getpid(), signal.SIGKILL)


def restore(state: State, source: str, directory: str, kill: int) -> dict[str, Any]:
    """The figures of a restore; from the disk with those of a raw read before it."""
    figures: dict[str, Any] = {}
    if source == "disk":
        raw_s = _raw_read_s(Path(directory))
        figures |= {"raw_read_s": raw_s, "raw_read_gib_per_s": state.num_bytes / _GIB / raw_s}
    live = live_training(state)
    kept_s = 60.0 if source == "memory" else 0.0
    reader = Managed(live, Path(directory), is_short=True, kept_s=kept_s)
    drop_from_cache(path for path in Path(directory).rglob("*") if path.is_file())
    _synchronize(state)
    began_s = time.perf_counter()
    reader.load(Path(directory))
    _synchronize(state)
    restore_s = time.perf_counter() - began_s
    figures |= {"restore_s": restore_s, "gib_per_s": state.num_bytes / _GIB / restore_s}
    reader.close()
    return {**figures, "ok": _are_equal(live, random_training(state))}


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


def _synchronize(state: State) -> None:
    if state.device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
