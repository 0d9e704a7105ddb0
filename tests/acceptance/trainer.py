"""One life of a trainer: restore, train, report every event, until done or killed.

Runs in a process of its own. It reports each batch, each loss and each tail as it happens, so
that the killer knows the whole history, lost work included. It knows nothing of its end but the
one event after which it waits until the killer has taken aim.
"""

from __future__ import annotations

import multiprocessing
import random
import warnings
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from iterators import CFIterator
from tests.acceptance.cases import CASES, Case

#: What kind of event, epoch, batch in the epoch.
Instant: TypeAlias = tuple[str, int, int]

RESTORING: Instant = ("restoring", 0, 0)

#: A machine that is quick with training and slow with kills must not finish the run meanwhile.
MOST_REPORTS_AFTER_AIM = 8


class Event(NamedTuple):
    """Something that happened at ``step`` boundaries; ``data`` are the bits to compare."""

    instant: Instant
    step: int
    data: object
    durable_step: int

    @property
    def history(self) -> tuple[Instant, int, object]:
        """What an uninterrupted run has as well: when a checkpoint is durable is up to the disk."""
        return self.instant, self.step, self.data


@dataclass(frozen=True, slots=True)
class Life:
    """``seed`` differs from life to life: what a restored run shares with it is luck no more.

    ``keeps_memory``: it goes on from what the life before left in memory, and leaves its own there.
    """

    case: str
    chk_dir: Path
    seed: int
    keeps_memory: bool = False
    hold_at: Instant | None = None


def train(life: Life, events: Connection, aimed: Connection) -> None:
    """Entry point of the process."""
    multiprocessing.set_start_method("fork", force=True)  # for loaders, as is usual; or ours rules
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*use of fork", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="Guards may run slower on Python 3.13.0")
    torch.set_num_threads(1)
    torch.manual_seed(life.seed)
    random.seed(life.seed)
    np.random.seed(life.seed)
    case = CASES[life.case]()
    case.folder = life.chk_dir.parent / "data"
    if case.warns:
        warnings.filterwarnings("ignore", message=case.warns)
    chk = CFCheckpoint(settled=case.settled, volatile=case.volatile, **case.tracked())
    with CFManager(
        life.chk_dir,
        chk,
        mode=CFMode.MANUAL,
        chk_freq=case.chk_freq,
        config=CFConfig(verify_settled=True, keep_in_memory_s=300.0 * life.keeps_memory),
    ) as cf:
        _Trainer(case, cf, events, aimed, life.hold_at).run()


class _Trainer:
    def __init__(
        self,
        case: Case,
        cf: CFManager,
        events: Connection,
        aimed: Connection,
        hold_at: Instant | None,
    ) -> None:
        self._case, self._cf = case, cf
        self._events, self._aimed, self._hold_at = events, aimed, hold_at
        self._reports_left: int | None = None
        self._loader = CFIterator(case.loader(), seed=7, cf_manager=cf, accumulate=case.accumulate)

    def run(self) -> None:
        self._report("restoring")
        self._cf.restore()
        self._report("restored", self._cf.stats()["restored_from"])
        if self._case.total_steps is None:
            self._epochs()
        else:
            for batch in self._loader.steps(self._case.total_steps):
                self._learn(batch)
        self._report("done", _everything(self._case))

    def _epochs(self) -> None:
        for epoch in self._loader.epochs(self._case.epochs):
            self._case.begin_epoch(epoch)
            for batch in self._loader:
                self._learn(batch)
                if self._loader.batch + 1 == self._case.last_batch:
                    break
            self._report("tail")
            self._case.tail(self._cf, epoch)
            self._report("tail_end")

    def _learn(self, batch: Any) -> None:
        ids = self._loader.last_ids
        self._report("batch", (None if ids is None else ids.tolist(), digest(batch)))
        self._report("loss", self._case.learn(self._cf, batch))

    def _report(self, kind: str, data: object = None) -> None:
        """Tell what happened; wait for the killer where it asked for that."""
        place = (
            (0, 0) if kind in ("restoring", "done") else (self._loader.epoch, self._loader.batch)
        )
        instant = (kind, *place)
        durable = self._cf.stats()["last_durable_step"] or 0
        self._events.send(Event(instant, self._cf.global_step, data, durable))
        if self._reports_left == 0:
            self._aimed.recv()  # never comes: the kill is on its way, and must not be outrun
        if self._reports_left is not None:
            self._reports_left -= 1
        if instant == self._hold_at:
            self._aimed.recv()
            self._reports_left = MOST_REPORTS_AFTER_AIM
        self._keep_up(durable)

    def _keep_up(self, durable: int) -> None:
        """A slow machine must not make a kill cost more steps than ``max_lag`` and a few."""
        if self._cf.global_step - durable <= self._case.max_lag:
            return
        if self._cf.stats()["num_in_flight"]:
            self._cf.wait()
        else:  # none was taken: the slots are still being prepared
            self._cf.save()


def _everything(case: Case) -> dict[str, str]:
    """Digests of all that training can depend on, by name."""
    found = {name: digest(_state(value)) for name, value in case.tracked().items()}
    found["rng.torch"] = digest(torch.get_rng_state())
    found["rng.python"] = digest(random.getstate())
    found["rng.numpy"] = digest(np.random.get_state(legacy=False))
    return found


def _state(value: Any) -> Any:
    return value if isinstance(value, dict) else value.state_dict()


def digest(value: Any) -> str:
    """A digest of every bit of a tree of tensors, strides included."""
    state = blake2b(digest_size=12)
    _feed(state, value)
    return state.hexdigest()


def _feed(state: blake2b, value: Any) -> None:
    match value:
        case Tensor():
            state.update(f"{value.dtype}{list(value.shape)}{value.stride()}".encode())
            bits = value.detach().contiguous().reshape(-1).view(torch.uint8)
            state.update(bits.numpy().tobytes())
        case np.ndarray():
            state.update(value.tobytes())
        case dict():
            for key in sorted(value, key=repr):
                state.update(repr(key).encode())
                _feed(state, value[key])
        case list() | tuple():
            state.update(f"{len(value)}[".encode())
            for item in value:
                _feed(state, item)
        case _:
            state.update(repr(value).encode())
