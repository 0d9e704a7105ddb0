"""How long the worker and the command line take to start: neither imports torch.

    python -m benchmarks.startup

``worker``: from starting the process until it answers that the directory is locked and ready.
``checkfreq --help``, ``checkfreq ls`` of a checkpoint: the whole process. ``python -c pass``:
an empty Python process.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.lab.record import emit
from checkfreq.config import CFConfig
from checkfreq.persist.client import WorkerClient
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes

_ROUNDS = 15


def main() -> None:
    """Print a line per process."""
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        store.open()
        commit_bytes(store, 1, {"m": b"abc"})
        _measure(folder)


def _measure(chk_dir: str) -> None:
    arms: dict[str, Callable[[], float]] = {
        "python -c pass": lambda: _process("-c", "pass"),
        "checkfreq --help": lambda: _process("-m", "checkfreq.cli", "--help"),
        "checkfreq ls": lambda: _process("-m", "checkfreq.cli", "ls", chk_dir),
        "worker": _worker,
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(_ROUNDS):
        for name, arm in arms.items():
            seconds[name].append(arm())
    for name, times in seconds.items():
        emit(
            "startup",
            arm=name,
            rounds=_ROUNDS,
            median_s=round(statistics.median(times), 4),
            max_s=round(max(times), 4),
        )


def _process(*arguments: str) -> float:
    start_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start_s


def _worker() -> float:
    with tempfile.TemporaryDirectory() as folder:
        client = WorkerClient(Path(folder), config=CFConfig())
        start_s = time.perf_counter()
        client.start()
        client.wait_opened()
        seconds = time.perf_counter() - start_s
        client.close(timeout_s=30.0)
    return seconds
