"""Whether memory, descriptors, files or the time per checkpoint grow over a long run.

    python -m benchmarks.endurance --checkpoints 20000

Trains with a checkpoint at each boundary, each durable before the next one begins, and with metrics
for every ``--metrics-every``th. One line per tenth of the run: the resources of trainer and worker
at its end, the entries of the directory, the sizes of its files besides checkpoints, and the median
times of the boundary and the persist. The last line (``arm`` "growth") compares the last tenth with
the second, because caches fill up in the first. ``notes_kib`` rises and falls: events.jsonl is
rotated at 1 MiB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lab.record import emit
from benchmarks.lab.states import Block
from benchmarks.lab.usage import Usage, tenths, warm_block, worker_pid
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode

_MIB = 2**20
_NOTES = ("events.jsonl", "events.1.jsonl", "marks.jsonl", "profile.json")


def main() -> None:
    """Print a line per tenth, and one that compares them."""
    args = _arguments()
    block = warm_block(int(args.mib * _MIB))
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="endurance-") as folder:
        chk = CFCheckpoint(block=block)
        config = CFConfig(stop_signals=())
        with CFManager(folder, chk, mode=CFMode.MANUAL, chk_freq=1, config=config) as manager:
            seen = []
            for number, size in enumerate(tenths(args.checkpoints), 1):
                seen.append(_tenth(manager, block, size, args.metrics_every, Path(folder)))
                emit("endurance", arm=str(number), **_settings(args), **seen[-1])
    emit("endurance", arm="growth", **_settings(args), **_growth(seen))


def _tenth(
    manager: CFManager, block: Block, size: int, metrics_every: int, folder: Path
) -> dict[str, Any]:
    boundaries_s, persists_s = [], []
    for _ in range(size):
        with manager.updating():
            block.change()
        start_s = time.perf_counter()
        manager.step()
        boundaries_s.append(time.perf_counter() - start_s)
        if manager.global_step % metrics_every == 0:
            manager.save(metrics={"loss": 1.0 / manager.global_step})
        manager.wait()
        event = manager.last_event
        if event is not None and event.kind == "committed":
            persists_s.append(float(event.data["persist_s"]))
    return {
        **_held("trainer", Usage.of(os.getpid())),
        **_held("worker", Usage.of(worker_pid(manager))),
        "entries": len(os.listdir(folder)),
        "notes_kib": round(sum(map(_size, (folder / name for name in _NOTES))) / 1024, 1),
        "boundary_ms": round(1e3 * statistics.median(boundaries_s), 4),
        "persist_ms": round(1e3 * statistics.median(persists_s), 4) if persists_s else None,
        "num_committed": manager.stats()["num_committed"],
        "num_failed": manager.stats()["num_failed"],
    }


def _held(who: str, usage: Usage) -> dict[str, Any]:
    return {
        f"{who}_mib": round((usage.private + usage.shared) / _MIB, 2),
        f"{who}_fds": usage.num_fds,
        f"{who}_threads": usage.num_threads,
    }


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _growth(seen: list[dict[str, Any]]) -> dict[str, Any]:
    """Growth from the second tenth to the last; times as ratios."""
    first, last = seen[min(1, len(seen) - 1)], seen[-1]
    counts = [name for name in last if not name.endswith("_ms") and not name.startswith("num_")]
    times = [name for name in last if name.endswith("_ms") and first[name] and last[name]]
    return {
        **{f"{name}_more": round(last[name] - first[name], 2) for name in counts},
        **{f"{name}_ratio": round(last[name] / first[name], 3) for name in times},
        "num_committed": last["num_committed"],
        "num_failed": last["num_failed"],
    }


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    settings = {"mib": args.mib, "checkpoints": args.checkpoints}
    return {**settings, "metrics_every": args.metrics_every, "folder": Path(args.folder)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--checkpoints", type=int, default=20_000, help="how many")
    parser.add_argument("--mib", type=float, default=0.0625, help="size of the state")
    parser.add_argument("--metrics-every", type=int, default=10, help="checkpoints with metrics")
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    return parser.parse_args()
