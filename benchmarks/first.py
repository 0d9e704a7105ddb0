"""How soon a run is protected: the arena after the first update, the first durable checkpoint.

    python -m benchmarks.first --mib 1024

An AUTO manager in a new directory (no cached profile) and a perceptron whose parameters and
momentum are ``--mib`` together. The arena (all slots) may take 3 s per GiB of it; the first
checkpoint must be durable within 3 x (10 T + L) from then, T the iteration and L the time to
durable, both measured in this run. A boundary notices what ended since the one before, so the
figures are late by at most an iteration.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch

from benchmarks.record import emit, run
from benchmarks.states import Perceptron
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast

ARENA_S_PER_GIB = 3.0
_PATIENCE_S = 600.0
_MOST_ITERATIONS = 10_000


def main() -> None:
    """Print one line per run."""
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="first-") as scratch:
            measure(Path(scratch), args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=float, default=1024.0, help="size of the state")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="of torch (0: its own choice)")
    parser.add_argument("--interval", type=int, help="MANUAL with this interval instead of AUTO")
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    return parser.parse_args()


class ReadyWatch:
    """Notes, on a thread of its own, when the arena became ready."""

    def __init__(self, manager: CFManager) -> None:
        self._arena = manager._pipeline._arena
        self.at_s: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        if self._arena.wait_ready(timeout_s=_PATIENCE_S):
            self.at_s = time.perf_counter()


def measure(scratch: Path, args: argparse.Namespace) -> None:
    """Train until a checkpoint is durable and T is known; print a line."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loop = Perceptron(int(args.mib * 2**20), batch=args.batch, device=device)
    times_s: list[float] = []
    with CFManager(
        scratch,
        CFCheckpoint(model=loop.model, optimizer=loop.optimizer),
        mode=CFMode.MANUAL if args.interval else CFMode.AUTO,
        chk_freq=args.interval,
        retention=KeepLast(2),
        config=CFConfig(stop_signals=()),
    ) as manager:
        loop.backward()
        manager.weight_update()
        updated_s = time.perf_counter()
        manager.step()
        watch = ReadyWatch(manager)
        durable_s = _until_durable(loop, manager, times_s)
        arena_gib = sum(slot.num_bytes for slot in manager._pipeline._arena.slots) / 2**30
        while manager.stats()["durable_s"] is None and len(times_s) < _MOST_ITERATIONS:
            _iterate(loop, manager, times_s)
        stats = manager.stats()
    assert watch.at_s is not None  # or no checkpoint would have been taken
    iteration_s, to_durable_s = stats["iteration_s"], stats["durable_s"]
    arena_s, allowed_s = watch.at_s - updated_s, 3 * (10 * iteration_s + to_durable_s)
    gib = stats["state_bytes"] / 2**30
    emit(
        "first",
        folder=Path(args.folder),
        arm="manual" if args.interval else "auto",
        device=device.type,
        mib=args.mib,
        arena_s=round(arena_s, 3),
        arena_s_per_gib=round(arena_s / arena_gib, 3),
        arena_s_per_gib_of_state=round(arena_s / gib, 3),
        arena_allowed_s_per_gib=ARENA_S_PER_GIB,
        first_durable_s=round(durable_s - watch.at_s, 3),
        allowed_s=round(allowed_s, 3),
        iteration_s=round(iteration_s, 4),
        durable_s=round(to_durable_s, 4),
        met=arena_s <= ARENA_S_PER_GIB * arena_gib and durable_s - watch.at_s <= allowed_s,
    )


def _until_durable(loop: Perceptron, manager: CFManager, times_s: list[float]) -> float:
    give_up_s = time.perf_counter() + _PATIENCE_S
    while not manager.stats()["num_committed"]:
        if time.perf_counter() > give_up_s:
            raise SystemExit(f"first: no durable checkpoint within {_PATIENCE_S:.0f} s")
        _iterate(loop, manager, times_s)
    return time.perf_counter()


def _iterate(loop: Perceptron, manager: CFManager, times_s: list[float]) -> None:
    start_s = time.perf_counter()
    loop.backward()
    manager.weight_update()
    manager.step()
    loop.synchronize()
    times_s.append(time.perf_counter() - start_s)


if __name__ == "__main__":
    run(main)
