"""How soon a new run is protected: the arena after the first update, the first durable checkpoint.

    python -m benchmarks.first --mib 1024

An AUTO manager starts in a new directory (no cached profile), with a perceptron whose parameters
and momentum take ``--mib`` together. The arena (all slots) may take 3 s per GiB. The first
checkpoint must be durable within 3 x (10 T + L) after that, where T is the iteration time and L the
time to durable, both measured in this run. A boundary notices what finished since the previous
one, so the figures can be late by up to one iteration.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.lab.record import emit
from benchmarks.lab.states import Perceptron
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
    """Records, in a thread, when the arena became ready."""

    def __init__(self, manager: CFManager) -> None:
        self._arena = manager._pipeline._arena
        self.at_s: float | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        if self._arena.wait_ready(timeout_s=_PATIENCE_S):
            self.at_s = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run: ``arena_s`` and ``first_durable_s``, both since the first update."""

    arena_s: float
    first_durable_s: float
    arena_gib: float
    state_gib: float
    iteration_s: float
    to_durable_s: float

    @property
    def allowed_s(self) -> float:
        """The time allowed for the first durable checkpoint after the arena: 3 x (10 T + L)."""
        return 3 * (10 * self.iteration_s + self.to_durable_s)

    @property
    def is_met(self) -> bool:
        """Whether both came in time."""
        arena_allowed_s = ARENA_S_PER_GIB * self.arena_gib
        return self.arena_s <= arena_allowed_s and self.first_durable_s <= self.allowed_s


def measure(scratch: Path, args: argparse.Namespace) -> None:
    """Train until a checkpoint is durable and T is known; print a line."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loop = Perceptron(int(args.mib * 2**20), batch=args.batch, device=device)
    with CFManager(
        scratch,
        CFCheckpoint(model=loop.model, optimizer=loop.optimizer),
        mode=CFMode.MANUAL if args.interval else CFMode.AUTO,
        chk_freq=args.interval,
        retention=KeepLast(2),
        config=CFConfig(stop_signals=()),
    ) as manager:
        start = _started(loop, manager)
    _report(start, device, args)


def _started(loop: Perceptron, manager: CFManager) -> Start:
    times_s: list[float] = []
    loop.backward()
    manager.weight_update()
    updated_s = time.perf_counter()
    manager.step()
    watch = ReadyWatch(manager)
    durable_s = _until_durable(loop, manager, times_s)
    arena_bytes = sum(slot.num_bytes for slot in manager._pipeline._arena.slots)
    while manager.stats()["durable_s"] is None and len(times_s) < _MOST_ITERATIONS:
        _iterate(loop, manager, times_s)
    assert watch.at_s is not None  # or no checkpoint would have been taken
    stats = manager.stats()
    return Start(
        arena_s=watch.at_s - updated_s,
        first_durable_s=durable_s - watch.at_s,
        arena_gib=arena_bytes / 2**30,
        state_gib=stats["state_bytes"] / 2**30,
        iteration_s=stats["iteration_s"],
        to_durable_s=stats["durable_s"],
    )


def _report(start: Start, device: torch.device, args: argparse.Namespace) -> None:
    emit(
        "first",
        folder=Path(args.folder),
        arm="manual" if args.interval else "auto",
        device=device.type,
        mib=args.mib,
        arena_s=round(start.arena_s, 3),
        arena_s_per_gib=round(start.arena_s / start.arena_gib, 3),
        arena_s_per_gib_of_state=round(start.arena_s / start.state_gib, 3),
        arena_allowed_s_per_gib=ARENA_S_PER_GIB,
        first_durable_s=round(start.first_durable_s, 3),
        allowed_s=round(start.allowed_s, 3),
        iteration_s=round(start.iteration_s, 4),
        durable_s=round(start.to_durable_s, 4),
        met=start.is_met,
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
