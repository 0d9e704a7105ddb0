"""The common part of the two torch adapters: the seed, checked settings, the engine underneath.

The engine is a plain ``DataLoader``, or torchdata's ``StatefulDataLoader`` if the user gave one. It
only runs the workers; the state of a ``StatefulDataLoader`` is never used. Training process only.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, default_convert
from torch.utils.data._utils import signal_handling

from iterators.order.batch_requests import Seeding, Share
from iterators.order.environment import in_process_group, rank_and_world
from iterators.order.epoch import fold64
from iterators.order.position import Identity
from iterators.order.seeds import default_seed
from iterators.protocol import Adapter
from iterators.torch.sampling import LoaderSettings
from iterators.torch.worker_start import WorkerStart, on_cpu

logger = logging.getLogger(__name__)

#: Iterators of torch loaders that have started workers.
_with_workers: weakref.WeakSet[Any] = weakref.WeakSet()

#: ``DataLoader``, or a subclass with the same settings.
Engine: TypeAlias = type[DataLoader[Any]]
Fetch = TypeVar("Fetch")

VERSIONS = (("numpy", np.__version__), ("torch", str(torch.__version__)))
GENERATORS = ("torch", "python", "numpy")


class SeededAdapter(Adapter):
    """A torch adapter whose seed was given, or is a default that a restored position replaces."""

    _identity: Identity
    _seeding: Seeding

    def __init__(self, seed: int | None, generator: torch.Generator | None, share: Share) -> None:
        self._takes_seed = seed is None
        if seed is None:
            seed = default_seed(generator, rank=share.rank, world=share.world)
        self._seed = seed

    @property
    def identity(self) -> Identity:
        """What must agree when a position is restored."""
        return self._identity

    @property
    def takes_seed(self) -> bool:
        """Whether no seed was given, so that a restored position brings its own."""
        return self._takes_seed

    def reseed(self, seed: int) -> None:
        """Use the order and the randomness of ``seed`` from the next ``open`` on."""
        self._seed, self._identity = seed, replace(self._identity, seed=seed)
        self._seeding = replace(self._seeding, seed=seed)
        self._rebuild()

    def _rebuild(self) -> None:
        """Make again what was made with the old seed."""
        raise NotImplementedError


def collate_of(batch_size: int | None, settings: LoaderSettings) -> Callable[[Any], Any]:
    """The user's ``collate_fn``, or torch's default for this ``batch_size``."""
    default = default_convert if batch_size is None else default_collate
    return settings.get("collate_fn") or default


def settings_of_engine(settings: LoaderSettings, **ours: Any) -> dict[str, Any]:
    """The user's settings and ours, with workers that leave signals to the training process."""
    workers = settings.get("num_workers", 0)
    start = {"worker_init_fn": WorkerStart(settings.get("worker_init_fn"))} if workers else {}
    return {**settings, **start, **ours}


def seed_generator(generator: torch.Generator, seed: int, epoch: int) -> None:
    """Seed a loader's private generator, from which torch draws the workers' base seeds."""
    generator.manual_seed(fold64(seed, epoch) & ((1 << 63) - 1))


def workers_started(engine: DataLoader[Any]) -> Iterator[Any]:
    """``iter(engine)``, which starts the engine's workers unless persistent ones are running.

    torch draws their base seed on the default device, which must be that of our generator. Workers
    that are forked have the CPU as their default device, as spawned ones do.
    """
    if engine.num_workers and forks_workers(engine) and in_process_group():
        warn_of_forks(sys.version_info[:3])
    if torch.get_default_device().type == "cpu":
        batches = iter(engine)
    else:
        with on_cpu():
            batches = iter(engine)
    if engine.num_workers:
        _leave_workers_to_parent()
        _end_workers_at_exit(os.getpid())
        for worker in batches._workers:  # type: ignore[attr-defined]
            worker.terminate = worker.kill  # torch's last resort, once nobody reads from them
        _with_workers.add(batches)
    return batches


@functools.cache
def _leave_workers_to_parent() -> None:
    """Keep a forked child from ending its parent's loader workers.

    When torch's iterator is collected, it tells its workers to end, through queues that a forked
    child has inherited. So in the child every iterator is marked as shut down already.
    """

    def disown() -> None:
        for batches in _with_workers:
            batches._shutdown = True  # torch checks this flag before it ends the workers
        _with_workers.clear()

    os.register_at_fork(after_in_child=disown)


@functools.cache
def _end_workers_at_exit(process: int) -> None:
    """Have workers that are left at the end of this process (its id) killed, without a word.

    ``multiprocessing`` would send them SIGTERM and wait. They would answer it by an exit that waits
    until somebody has read their batches (see ``WorkerStart``), and nobody does any more.
    """
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    for batches in _with_workers:
        if batches._worker_pids_set:  # or torch's handler of SIGCHLD reports a killed worker
            signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
            batches._worker_pids_set = False
        for worker in batches._workers:
            worker.kill()


def forks_workers(engine: DataLoader[Any]) -> bool:
    """Whether the engine starts its workers by forking this process."""
    context = engine.multiprocessing_context or multiprocessing
    return bool(context.get_start_method() == "fork")


@functools.cache
def warn_of_forks(python: tuple[int, int, int]) -> None:
    """Warn once that a forked worker may hang, on interpreters in which it may.

    If a thread of the process group frees a tensor while another thread forks, a lock of the
    interpreter can stay locked in the child for ever (python/cpython#112275).
    """
    if python < (3, 11, 10) and not (3, 10, 15) <= python < (3, 11):
        logger.warning(
            "loader workers are forked while a process group is alive. This is Python %d.%d.%d: "
            "before 3.11.10 such a worker can hang when it starts, and training hangs with it "
            "(python/cpython#112275). Use a newer Python, or multiprocessing_context='forkserver'",
            *python,
        )


def fetch_next(items: Iterator[Fetch], guard: Seeding | None) -> Fetch:
    """The next item. ``guard``: its generators are given back to the caller unchanged.

    Needed where samples are loaded in the training process, which seeds its global generators.
    """
    if guard is None:
        return next(items)
    with guard.caller_kept():
        return next(items)


def share_of(batch_size: int | None, tail: str, rank: int | None, world: int | None) -> Share:
    """This rank's share. ``rank`` and ``world`` default to those of the process group."""
    if tail not in ("short", "drop"):
        raise ValueError(f"tail must be 'short' or 'drop', got {tail!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    rank, world = rank_and_world(rank, world)
    return Share(batch_size or 1, world, rank, tail)


def seeding_of(seed: int, seeded: Collection[str]) -> Seeding:
    """The ``Seeding`` for a checked seed and the checked names of generators."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must lie in [0, 2**64), got {seed}")
    unknown = set(seeded) - set(GENERATORS)
    if unknown or isinstance(seeded, str):
        raise ValueError(f"seeded must be a collection of names from {GENERATORS}, got {seeded!r}")
    return Seeding(seed, *(name in seeded for name in GENERATORS))
