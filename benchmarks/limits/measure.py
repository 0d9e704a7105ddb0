"""The fastest that this disk and memory allow any checkpointing: the limits behind the targets.

    python -m benchmarks.limits --gib 1 --rounds 5

Arms run interleaved in random order, on ``--gib`` of incompressible data each. ``against_raw`` is
the median over rounds of an arm's throughput against ``write, direct, 4 threads`` (`raw` in the
other benchmarks); ``low`` and ``high`` are quartiles. Writing: a new file, synced at its end, with
direct I/O by several threads or through the page cache. ``copy, then write`` first copies
everything, as a snapshot does. ``copy and write`` writes each chunk as soon as it is copied: the
best that an engine could do that overlaps the two. Reading: with direct I/O into memory that was in
use before (``touched``) and into new memory (``fresh``), and through the page cache, dropped
before, into ``touched``. Restoring: three ways to verify every byte before the first one is copied
to its destination: all of it in new memory (as ours does); reading twice through a small buffer;
and the same through the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_digest

from benchmarks.lab.estimate import quartiles
from benchmarks.lab.rawio import drop_from_cache, incompressible, read_once, write_once
from benchmarks.lab.record import emit, median_ratio
from benchmarks.lab.rounds import Arm, Seconds, interleaved
from checkfreq.restore.buffers import new_buffer

_MIB = 1 << 20
_THREADS = 4
_CHUNK_BYTES = 8 * _MIB
_BASELINE = f"write, direct, {_THREADS} threads"


class Limits:
    """One state in memory, memory for a copy of it, and one file."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._state = incompressible(num_bytes)
        self._copy = incompressible(num_bytes)

    def arms(self) -> dict[str, Callable[[], float]]:
        """Measure each way once; returns seconds by name."""
        write = {
            _BASELINE: self._written,
            **{
                f"write, direct, {threads} threads": partial(self._written, threads=threads)
                for threads in (1, 2, 8, 16)
            },
            **{
                f"write, direct, chunks of {mib} MiB": partial(self._written, chunk_mib=mib)
                for mib in (1, 32)
            },
            "write, page cache": partial(self._written, direct=False),
            "copy": self._copied,
            "copy, then write": lambda: self._copied() + self._written(),
            "copy and write": partial(self._written, fill=self._fill),
        }
        read = {
            "read, direct, touched": lambda: self._read(memoryview(self._copy)),
            "read, direct, fresh": lambda: self._read(new_buffer(len(self._copy))),
            "read, page cache": lambda: self._read(memoryview(self._copy), direct=False),
        }
        restore = {
            "restore, through new memory": self._restored_from_memory,
            "restore, read twice": self._read_twice,
            "restore, through the page cache": partial(self._read_twice, direct=False),
        }
        return write | read | restore

    def _written(
        self,
        *,
        direct: bool = True,
        threads: int = _THREADS,
        chunk_mib: int = _CHUNK_BYTES // _MIB,
        fill: Callable[[int, int], None] = lambda start, end: None,
    ) -> float:
        return write_once(
            self._path,
            self._copy,
            direct=direct,
            threads=threads,
            chunk_bytes=chunk_mib * _MIB,
            fill=fill,
        )

    def _copied(self) -> float:
        began_s = time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as pool:
            starts = range(0, len(self._copy), _CHUNK_BYTES)
            list(pool.map(lambda at: self._fill(at, at + _CHUNK_BYTES), starts))
        return time.perf_counter() - began_s

    def _fill(self, start: int, end: int) -> None:
        with memoryview(self._state)[start:end] as source:
            self._take(source, start)

    def _take(self, source: memoryview, start: int) -> None:
        """Copy a chunk to its destination."""
        target = np.frombuffer(self._copy, np.uint8)
        np.copyto(target[start : start + len(source)], np.frombuffer(source, np.uint8))

    def _read(self, memory: memoryview, *, direct: bool = True) -> float:
        drop_from_cache([self._path])
        with memory:
            return self._pass(memory, direct=direct)

    def _pass(
        self,
        memory: memoryview,
        *,
        direct: bool,
        then: Callable[[memoryview, int], None] = lambda chunk, offset: None,
    ) -> float:
        """Read the whole file once, chunk by chunk through ``memory``."""
        return read_once(
            self._path,
            memory,
            len(self._copy),
            direct=direct,
            threads=_THREADS,
            chunk_bytes=_CHUNK_BYTES,
            then=then,
        )

    def _restored_from_memory(self) -> float:
        began_s = time.perf_counter()
        with new_buffer(len(self._copy)) as memory:
            self._pass(memory, direct=True, then=_check)
            with ThreadPoolExecutor(_THREADS) as pool:
                starts = range(0, len(memory), _CHUNK_BYTES)
                list(pool.map(lambda at: self._take(memory[at : at + _CHUNK_BYTES], at), starts))
        return time.perf_counter() - began_s

    def _read_twice(self, *, direct: bool = True) -> float:
        drop_from_cache([self._path])
        began_s = time.perf_counter()
        with memoryview(self._state)[: 4 * _THREADS * _CHUNK_BYTES] as memory:
            self._pass(memory, direct=direct, then=_check)
            self._pass(memory, direct=direct, then=self._take)
        return time.perf_counter() - began_s


def _check(chunk: memoryview, offset: int) -> None:
    xxh3_64_digest(chunk)


def measure(scratch: Path, num_bytes: int, rounds: int) -> Seconds:
    """Seconds of every arm, a value per round."""
    limits = Limits(scratch / "file", num_bytes // _MIB * _MIB)
    arms = limits.arms()
    arms[_BASELINE]()  # there is a file to read, and memory is in use
    named: list[Arm] = [partial(_named, name, arm) for name, arm in arms.items()]
    return interleaved(named, rounds=rounds)


def _named(name: str, arm: Callable[[], float]) -> dict[str, float]:
    return {name: arm()}


def main() -> None:
    """Print a line per arm."""
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="limits-") as scratch:
        seconds = measure(Path(scratch), int(args.gib * 2**30), args.rounds)
    for name, times in seconds.items():
        median_s = statistics.median(times)
        emit(
            "limits",
            folder=Path(args.folder),
            arm=name,
            gib=args.gib,
            rounds=args.rounds,
            median_s=round(median_s, 4),
            gb_per_s=_gb_per_s(args.gib, median_s),
            **_spread(args.gib, times),
            throughput_against_raw=round(median_ratio(seconds[_BASELINE], times), 3),
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    return parser.parse_args()


def _gb_per_s(gib: float, seconds: float) -> float:
    return round(gib * 2**30 / seconds / 1e9, 3)


def _spread(gib: float, times: Sequence[float]) -> dict[str, dict[str, float]]:
    """The quartiles, where there are several values; the longest time is the lowest rate."""
    if len(times) < 2:
        return {}
    short_s, long_s = quartiles(times)
    return {
        "low": {"median_s": round(short_s, 4), "gb_per_s": _gb_per_s(gib, long_s)},
        "high": {"median_s": round(long_s, 4), "gb_per_s": _gb_per_s(gib, short_s)},
    }
