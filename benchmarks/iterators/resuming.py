"""The arms of `benchmarks.iterators`' resume table: ours, and how others enter an epoch.

An arm is prepared once, not timed: it finds out, by really iterating where there is no other
way, what it must save at a place. Then it is resumed ``--repeats`` times from nothing: build the
loader, enter the place, fetch one batch; taking the loader down is not timed. Samples are numbers
that cost nothing; DALI's are the bytes of one small file under many names.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.imagenet.options import is_installed
from benchmarks.lab.record import emit
from iterators import CFIterator, Ledger, Position, ResumableDataLoader
from iterators.protocol import Adapter

BATCH = 256
PLACES = (0.001, 0.5, 0.999)
#: What a permutation kept as a list takes: an int64 in a tensor, a pointer and a Python int.
BYTES_PER_LISTED_ID = 8 + 8 + 32

#: Builds everything anew; returns the first batch behind the place, and what would be taken down.
Resume = Callable[[], tuple[object, object]]
#: (samples, batches behind the place) -> how to resume there.
Prepare = Callable[[int, int], Resume]


class Numbers(Dataset[int]):
    """Sample ``i`` is ``i``, at no cost."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class CannotResume(Exception):
    """The arm cannot do this at all; the message says why."""


def measure_resume(args: argparse.Namespace, scratch: Path) -> None:
    """A line per arm, number of samples and place."""
    for n in args.samples:
        for arm, prepare in arms(scratch):
            for place in PLACES:
                fields = measured(prepare, n, int(place * n) // BATCH, args.repeats)
                emit("iterators", what="resume", arm=arm, n=n, place=place, **fields)


def measured(prepare: Prepare, n: int, batches: int, repeats: int) -> dict[str, Any]:
    """The median and the slowest of ``repeats``, after one that is not counted."""
    try:
        resume = prepare(n, batches)
    except CannotResume as reason:
        return {"milliseconds": None, "why_not": str(reason)}
    seconds = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        first = resume()
        seconds.append(time.perf_counter() - start_s)
        del first
    return {
        "milliseconds": round(statistics.median(seconds[1:]) * 1e3, 2),
        "slowest": round(max(seconds[1:]) * 1e3, 2),
    }


def arms(scratch: Path) -> Iterator[tuple[str, Prepare]]:
    """Ours first; a peer only where it is installed."""
    yield "checkfreq, DataLoader, 0 workers", lambda n, batches: ours(n, batches, workers=0)
    yield "checkfreq, DataLoader, 2 workers", lambda n, batches: ours(n, batches, workers=2)
    if is_installed("torchdata"):
        yield "StatefulDataLoader, 0 workers", stateful
    if is_installed("accelerate"):
        yield "accelerate, skip_first_batches", skipping
    if is_installed("nvidia.dali"):
        from benchmarks.iterators.resuming_dali import dali_arms

        yield from dali_arms(scratch)


def ours(n: int, batches: int, *, workers: int) -> Resume:
    """Our order under a plain DataLoader."""
    return entering(
        lambda: ResumableDataLoader(Numbers(n), BATCH, shuffle=True, num_workers=workers), batches
    )


def entering(make: Callable[[], Adapter], batches: int) -> Resume:
    """A position needs no run up to it: it is made here."""
    place = batches * BATCH
    # The ledger's count is all that is asked of it before the epoch's end.
    state = Position(make().identity, position=place, ledger=Ledger(count=place)).to_dict()

    def resume() -> tuple[object, object]:
        iterator = CFIterator(make())
        iterator.load_state_dict(state)
        served = iter(iterator)
        return next(served), served

    return resume


def require_room(n: int, *, bytes_each: int = BYTES_PER_LISTED_ID) -> None:
    """The arm keeps every sample of an epoch in a list."""
    needed = n * bytes_each
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory // 2:
        raise CannotResume(
            f"a list of {n:,} samples takes about {needed / 2**30:.0f} GiB; this machine has "
            f"{memory / 2**30:.0f}"
        )


def stateful(n: int, batches: int) -> Resume:
    """torchdata's loader and its own state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    require_room(n)

    def make() -> Any:
        return StatefulDataLoader(Numbers(n), BATCH, shuffle=True)

    loader = make()
    served = iter(loader)
    for _ in range(batches):
        next(served)
    state = loader.state_dict()
    del served

    def resume() -> tuple[object, object]:
        fresh = make()
        fresh.load_state_dict(state)
        served = iter(fresh)
        return next(served), served

    return resume


def skipping(n: int, batches: int) -> Resume:
    """accelerate's loader that leaves out the first batches."""
    from accelerate import skip_first_batches

    require_room(n)

    def resume() -> tuple[object, object]:
        generator = torch.Generator().manual_seed(0)
        loader = DataLoader(Numbers(n), BATCH, shuffle=True, generator=generator)
        served = iter(skip_first_batches(loader, batches))
        return next(served), served

    return resume
