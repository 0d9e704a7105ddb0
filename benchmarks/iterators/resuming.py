"""The resume table of `benchmarks.iterators`: how ours and others enter the middle of an epoch.

An arm is first prepared, untimed: it determines what to save at a position, by iterating there if
there is no other way. Then it is resumed ``--repeats`` times from scratch: build the loader, go to
the position, fetch one batch. Shutting the loader down is not timed. Samples are numbers that cost
nothing; for DALI they are the bytes of one small file under many names.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.iterators.resuming_shared import BATCH, CannotResume, Prepare
from benchmarks.iterators.resuming_torch import ours, skipping, stateful
from benchmarks.lab.record import emit
from checkfreq.examples.imagenet.options import is_installed

PLACES = (0.001, 0.5, 0.999)


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
    """Ours first; other libraries only if they are installed."""
    yield "checkfreq, DataLoader, 0 workers", lambda n, batches: ours(n, batches, workers=0)
    yield "checkfreq, DataLoader, 2 workers", lambda n, batches: ours(n, batches, workers=2)
    if is_installed("torchdata"):
        yield "StatefulDataLoader, 0 workers", stateful
    if is_installed("accelerate"):
        yield "accelerate, skip_first_batches", skipping
    if is_installed("nvidia.dali"):
        from benchmarks.iterators.resuming_dali import dali_arms

        yield from dali_arms(scratch)
