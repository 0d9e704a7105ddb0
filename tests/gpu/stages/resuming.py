"""What the stages share that kill a training: its starts, and claims about its bits.

Each start is a process forked from a server that has imported torch and has not touched the device.
A program is ``train(stage, directory, kill)``: it returns digests by name, and calls `tick` at the
top of each iteration. With ``--spoil`` a start changes what it restored, so that claims must fail.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from checkfreq import CFCheckpoint, CFConfig, CFManager, KeepLast
from iterators.testing import digest
from tests.fork_server import FORK_SERVER
from tests.gpu.stages.lines import is_dry, say, scratch
from tests.gpu.test_training import manager_of
from tests.silence.training import Trial, tried

#: The name of the directory of the start that nothing disturbs, as `tried` gives it.
UNDISTURBED = "whole"
_IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "tests.gpu.stages.resuming")
_RESTORED = re.compile(r"restored step (\d+)( from memory)?")


@dataclass(frozen=True, slots=True)
class Stage:
    """How a stage runs, which its starts are told."""

    is_dry: bool
    is_spoiled: bool

    @classmethod
    def begin(cls) -> Stage:
        """As the command line says; tells which device it is."""
        stage = cls(is_dry(), "--spoil" in sys.argv)
        say("device", name="cpu" if stage.is_dry else torch.cuda.get_device_name())
        return stage

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return torch.device("cpu" if self.is_dry else "cuda")

    def processes(self, *imported: str) -> BaseContext:
        """Where its starts come from: the server, or new interpreters if it has spoilt the device.

        The server imports ``imported`` besides. Nothing that it imports may initialise the driver,
        which a fork could not use then. torch does so when it asks for a device, which it does in
        some imports; it is told to ask NVML instead.
        """
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        FORK_SERVER.set_forkserver_preload([*_IMPORTED, *imported])
        if not self.is_dry:
            probe = FORK_SERVER.Process(target=_touch_device)
            probe.start()
            probe.join()
            if probe.exitcode != 0:
                say("processes", note="a fork cannot use the device: each start imports torch")
                return multiprocessing.get_context("spawn")
        return FORK_SERVER


@contextlib.contextmanager
def part(name: str) -> Iterator[Path]:
    """A part of a stage, with a folder: what it raises is a failed claim, and no more."""
    try:
        with scratch() as folder:
            yield Path(folder)
    except Exception as error:
        traceback.print_exc()
        why = (str(error).strip().splitlines() or [""])[-1]
        say(name, ok=False, why=f"{type(error).__name__}: {why[:300]}")


Program = Callable[[Stage, str, int], dict[str, Any]]


def claim_same_bits(
    stage: Stage,
    program: Program,
    folder: Path,
    *,
    kills: Sequence[int],
    context: BaseContext,
    **about: Any,
) -> Trial:
    """Train whole, then with SIGKILLs at these updates; a claim for each digest of the end.

    Two more are that every killed start was resumed from a checkpoint, and that none logged a
    warning. Raises AssertionError if a start ends in another way than it should.
    """
    trial = tried(partial(program, stage), folder, kills=kills, context=context)
    for what, found in trial.resumed.result.items():
        expected = trial.whole.result[what]
        say(what, **about, digest=found, expected=expected, ok=found == expected)
    restored = [
        match[0]
        for start in (*trial.killed, trial.resumed)
        if (match := _RESTORED.search("\n".join(start.infos)))
    ]
    say("restarts", **about, restored=restored, ok=len(restored) == len(kills))
    warnings = trial.warnings
    say("warnings", **about, warnings=warnings, ok=not warnings)
    return trial


# ---- in a start


def begin() -> None:
    """Equal seeds in every start, and kernels that give equal bits."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def opened(directory: str, chk_freq: int, *, keep: int = 2, **tracked: Any) -> CFManager:
    """A manager that checkpoints so often, but for the undisturbed start."""
    return manager_of(
        Path(directory),
        CFCheckpoint(**tracked),
        chk_freq=0 if Path(directory).name == UNDISTURBED else chk_freq,
        retention=KeepLast(keep),
        config=CFConfig(close_timeout_s=120.0, takeover_s=60.0, keep_in_memory_s=60.0),
    )


def restore(stage: Stage, manager: CFManager, model: nn.Module) -> None:
    """Restore what is there."""
    if manager.restore() and stage.is_spoiled:
        next(model.parameters()).detach().flatten()[0] += 1


def tick(manager: CFManager, kill: int) -> None:
    """Die before the update ``kill``; two updates earlier, wait until something is durable.

    Before that wait for slots, or a few fast updates would be over without a checkpoint.
    """
    update = manager.global_step + 1
    if update < kill - 2:
        manager._pipeline._arena.wait_ready(timeout_s=60.0)
    if update == kill - 2:
        manager.wait()
    if update == kill:
        os.kill(os.getpid(), signal.SIGKILL)


class Losses(nn.Module):
    """The loss of each update, kept on the device: reading one would wait for it."""

    values: torch.Tensor

    def __init__(self, num_steps: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("values", torch.zeros(num_steps, device=device))

    def note(self, manager: CFManager, loss: torch.Tensor) -> None:
        """That of the update that comes before the next boundary."""
        self.values[manager.global_step] = loss.detach()


def digests(**parts: Any) -> dict[str, str]:
    """Of each object's state dict, and of the generators of this process."""
    generators = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    found = {name: digest(part.state_dict()) for name, part in parts.items()}
    found["generators"] = digest(generators)
    if torch.cuda.is_initialized():
        found["device_generator"] = digest(torch.cuda.get_rng_state())
    return found


def _touch_device() -> None:
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        sys.exit(str(error))
