"""What the two torch adapters have in common: checked settings, and the loader underneath.

That engine is a plain ``DataLoader``, or torchdata's ``StatefulDataLoader`` if that was given; it
only runs workers. Its own state, if it has one, is never asked for. Training process only.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate, default_convert

from iterators.order.batch_requests import Seeding, Share
from iterators.order.environment import in_process_group, rank_and_world
from iterators.order.epoch import fold64
from iterators.torch.sampling import LoaderSettings
from iterators.torch.worker_start import WorkerStart

logger = logging.getLogger(__name__)

#: Iterators of torch loaders whose workers are running, or were.
_with_workers: weakref.WeakSet[Any] = weakref.WeakSet()

Engine: TypeAlias = type[DataLoader[Any]]
Fetch = TypeVar("Fetch")

VERSIONS = (("numpy", np.__version__), ("torch", str(torch.__version__)))
GENERATORS = ("torch", "python", "numpy")


def collate_of(batch_size: int | None, settings: LoaderSettings) -> Callable[[Any], Any]:
    """The user's ``collate_fn``, or the one that torch takes instead."""
    default = default_convert if batch_size is None else default_collate
    return settings.get("collate_fn") or default


def settings_of_engine(settings: LoaderSettings, **ours: Any) -> dict[str, Any]:
    """The user's settings and ours, with workers that leave signals to this process."""
    workers = settings.get("num_workers", 0)
    start = {"worker_init_fn": WorkerStart(settings.get("worker_init_fn"))} if workers else {}
    return {**settings, **start, **ours}


def aim_generator(generator: torch.Generator, seed: int, epoch: int) -> None:
    """Set a loader's private generator, from which the workers' base seeds come."""
    generator.manual_seed(fold64(seed, epoch) & ((1 << 63) - 1))


def workers_started(engine: DataLoader[Any]) -> Iterator[Any]:
    """``iter(engine)``, which starts its workers if it has any that are not running."""
    if engine.num_workers and forks_workers(engine) and in_process_group():
        warn_of_forks(sys.version_info[:3])
    batches = iter(engine)
    if engine.num_workers:
        _leave_workers_to_parent()
        _with_workers.add(batches)
    return batches


@functools.cache
def _leave_workers_to_parent() -> None:
    """A fork that lets go of an inherited iterator must not tell the parent's workers to end.

    torch's iterator does that when it is collected, through queues that both processes have.
    """

    def disown() -> None:
        for batches in _with_workers:
            batches._shutdown = True  # what it checks before it ends its workers

    os.register_at_fork(after_in_child=disown)


def forks_workers(engine: DataLoader[Any]) -> bool:
    """Whether its worker processes are forked from this one."""
    context = engine.multiprocessing_context or multiprocessing
    return bool(context.get_start_method() == "fork")


@functools.cache
def warn_of_forks(python: tuple[int, int, int]) -> None:
    """Say once that a forked worker may hang, where the interpreter is one in which it may.

    A process group's thread that lets go of a tensor while another thread forks can leave a lock
    of the interpreter locked in the child (python/cpython#112275).
    """
    if python < (3, 11, 10):
        logger.warning(
            "loader workers are forked while a process group is alive: before Python 3.11.10 one "
            "can hang as it starts, and training with it (python/cpython#112275). Found Python "
            "%d.%d.%d: use a newer one, or multiprocessing_context='forkserver'",
            *python,
        )


def fetched(items: Iterator[Fetch], guard: Seeding | None) -> Fetch:
    """The next item; with a ``guard``, the caller keeps its generators."""
    if guard is None:
        return next(items)
    with guard.caller_kept():
        return next(items)


def share_of(batch_size: int | None, tail: str, rank: int | None, world: int | None) -> Share:
    """This rank's share; ``rank`` and ``world`` are the process group's unless given."""
    if tail not in ("short", "drop"):
        raise ValueError(f"tail must be 'short' or 'drop', got {tail!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    rank, world = rank_and_world(rank, world)
    return Share(batch_size or 1, world, rank, tail)


def seeding_of(seed: int, seeded: Collection[str]) -> Seeding:
    """Which generators are seeded, checked."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must lie in [0, 2**64), got {seed}")
    unknown = set(seeded) - set(GENERATORS)
    if unknown or isinstance(seeded, str):
        raise ValueError(f"seeded is a collection of {GENERATORS}, got {seeded!r}")
    return Seeding(seed, *(name in seeded for name in GENERATORS))
