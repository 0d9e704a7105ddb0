"""Runs a small training whole, then again with kills and restarts, and compares the ends.

A program is a function of a test module, ``train(directory, kill)``: it returns what must be equal,
and calls ``tick`` at the top of each iteration. Each start is a process forked from the server that
has imported torch, so it costs its own time only.
"""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager, CFMode
from iterators import CFIterator
from iterators.testing import digest as bits_of
from tests.acceptance.processes import wait_unlocked
from tests.fork_server import FORK_SERVER

#: Arguments of a manager that checkpoints every boundary.
EVERY: dict[str, Any] = {"mode": CFMode.MANUAL, "chk_freq": 1}

#: ``(directory, kill)``: where to checkpoint, and the update to be killed at (0: none).
Program = Callable[[str, int], Any]

_DEADLINE_S = 240.0
_PACKAGES = ("checkfreq", "iterators")


@dataclass
class Start:
    """One process that ran a program: its result, what it logged, its exit status (-9: killed)."""

    result: Any = None
    records: list[tuple[int, str]] = field(default_factory=list)
    error: str = ""
    exit_code: int | None = None

    @property
    def warnings(self) -> list[str]:
        """What the two packages logged at WARNING or above."""
        return [text for level, text in self.records if level >= logging.WARNING]

    @property
    def infos(self) -> list[str]:
        """What the two packages logged at INFO."""
        return [text for level, text in self.records if level == logging.INFO]


@dataclass
class Trial:
    """The undisturbed start, those that were killed, and the one that resumed to the end."""

    whole: Start
    killed: list[Start]
    resumed: Start

    @property
    def is_exact(self) -> bool:
        """Whether the killed run ended with the same bits as the undisturbed one."""
        return bool(self.whole.result == self.resumed.result)

    @property
    def warnings(self) -> list[str]:
        """Every warning of every start."""
        starts = (self.whole, *self.killed, self.resumed)
        return [text for start in starts for text in start.warnings]


def start(program: Program, chk_dir: Path, *, kill: int = 0, context: Any = FORK_SERVER) -> Start:
    """Run ``program`` in a process of its own, until it ends or kills itself.

    ``context``: of multiprocessing, for the process.
    """
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(there, program, str(chk_dir), kill))
    process.start()
    there.close()
    started = Start()
    while here.poll(_DEADLINE_S):
        try:
            kind, value = here.recv()
        except (EOFError, ConnectionResetError):
            break
        if kind == "record":
            started.records.append(value)
        else:
            setattr(started, kind, value)
    process.join(_DEADLINE_S)
    started.exit_code = process.exitcode
    if process.is_alive():
        process.kill()
    process.close()
    here.close()
    return started


def tried(
    program: Program, folder: Path, *, kills: Sequence[int] = (11,), context: Any = FORK_SERVER
) -> Trial:
    """Run ``program`` undisturbed, then with a SIGKILL at each update of ``kills``, to its end.

    Fails if a start ends in another way than it should.
    """
    whole = start(program, folder / "whole", context=context)
    assert whole.exit_code == 0, whole.error
    *killed, resumed = killed_and_resumed(program, folder / "killed", kills=kills, context=context)
    return Trial(whole, killed, resumed)


def killed_and_resumed(
    program: Program, chk_dir: Path, *, kills: Sequence[int] = (11,), context: Any = FORK_SERVER
) -> list[Start]:
    """Run ``program`` with a SIGKILL at each update of ``kills``, and then to its end."""
    starts = []
    for kill in kills:
        starts.append(start(program, chk_dir, kill=kill, context=context))
        assert starts[-1].exit_code == -signal.SIGKILL, starts[-1].error or "it was not killed"
        wait_unlocked(chk_dir)
    starts.append(start(program, chk_dir, context=context))
    assert starts[-1].exit_code == 0, starts[-1].error
    return starts


def tick(manager: CFManager, kill: bool) -> None:
    """Make what is in flight durable; then kill this process, if ``kill``."""
    manager.wait()
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)


def data(n: int = 64, batch: int = 8, **options: Any) -> DataLoader[Any]:
    """A shuffled loader of ``n`` samples: ``x`` is ``[batch, 8]``, the 3 classes ``[batch]``."""
    torch.manual_seed(0)
    x = torch.randn(n, 8)
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    return DataLoader(dataset, batch_size=batch, shuffle=True, **options)


def trained(
    directory: str | Path,
    kill: int,
    loader: Any,
    update: Callable[[CFManager, Any], object],
    *,
    epochs: int = 3,
    **tracked: Any,
) -> CFManager:
    """The loop that users write, up to the end or to the update to be killed at."""
    with CFManager(directory, CFCheckpoint(**tracked), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in batches.epochs(epochs):
            for batch in batches:
                tick(manager, manager.global_step + 1 == kill)
                update(manager, batch)
    return manager


def learning(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[CFManager, Any], object]:
    """An update with one batch of ``data``."""

    def update(manager: CFManager, batch: Any) -> None:
        loss_of(model, *batch).backward()
        manager.weight_update()
        optimizer.zero_grad()

    return update


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of ``model`` on one batch."""
    return nn.functional.cross_entropy(model(x), y)


def digest(*states: Any) -> str:
    """A digest of every bit of modules, tensors, arrays and plain containers of them."""
    return bits_of([one.state_dict() if hasattr(one, "state_dict") else one for one in states])


class _Sending(logging.Handler):
    """Sends what the packages log at once: the process may be killed at the next instruction."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.INFO)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.send(("record", (record.levelno, record.getMessage())))


def _child(pipe: Connection, program: Program, directory: str, kill: int) -> None:
    torch.set_num_threads(1)
    for name in _PACKAGES:
        logging.getLogger(name).addHandler(_Sending(pipe))
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        result = program(directory, kill)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise
    pipe.send(("result", result))
