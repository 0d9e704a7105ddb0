"""One checkpoint with each library, in one run: how long training stops, when it is durable.

AdamW's training state of 4 GiB is saved by every arm in turn while training continues: ours with
host and device snapshots, DCP's ``async_save`` in a thread and in a process with pinned staging,
and ``torch.save``, each synced. ``held_ms``, ``added_ms`` and ``durable_s`` are those of
benchmarks/compare; ``waited_ms``: how long the device waited for the copy. A line per save: those
of round 0 include what a library does once. Ours has its slots by then, after ``slots_s``.
``ratio``: ours divided by the best other's, of the last saves; of arms that saved twice at least.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.lab.capacity import shortage
from benchmarks.lab.rawio import RawWriter
from benchmarks.lab.saver import Saver, Training
from benchmarks.lab.saving import Work, iterate, sample, shown
from benchmarks.lab.states import adamw_training, write_to_all
from benchmarks.peers import PEERS
from benchmarks.peers.ours import CheckFreq
from checkfreq.types import SnapshotPlace
from tests.gpu.stages.lines import is_dry, say, scratch

_GIB = 2**30
_SHARING = "dcp.async_save, process"  # in /dev/shm, all of the state
_OTHERS = ("dcp.async_save, thread", "torch.save, synced", _SHARING)
_ROUNDS = 3
#: No save begins that would not end within this time, as far as its last one tells, or others.
_SECONDS = 80.0
#: Copies of the state: slots, two stagings, what passes through; on the device; on the disk.
_COPIES, _ON_DEVICE, _ON_DISK = 5.0, 2.5, 3.5
_TENSORS = 64
_SLOTS_WITHIN_S = 60.0


class Ours(CheckFreq):
    """Its snapshots are taken in the place that is asked for at the time."""

    place = SnapshotPlace.HOST

    def boundary(self, *, save: bool) -> None:
        self._manager._pipeline.set_place(self.place)
        super().boundary(save=save)

    def await_slots(self) -> float:
        """Seconds until the slots are there, pinned."""
        began_s = time.perf_counter()
        self.boundary(save=False)
        if not self._manager._pipeline._arena.wait_ready(timeout_s=_SLOTS_WITHIN_S):
            raise SystemExit(f"no slots within {_SLOTS_WITHIN_S:.0f} s")
        return time.perf_counter() - began_s

    @property
    def waited_s(self) -> float:
        """How long devices have waited for copies so far."""
        return self._manager._pipeline._snapshotter.device_wait_s

    @property
    def was_on_device(self) -> bool:
        """Whether the last snapshot was first copied in the device's memory."""
        return self._manager._pipeline._snapshotter.engine.last_device_copy_s is not None


def main() -> None:
    """Print a line per save."""
    began_s, dry = time.monotonic(), is_dry()
    # DCP's process would wait half an hour for a host whose own name has no address.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    device = torch.device("cpu" if dry else "cuda")
    with scratch() as folder:
        gib = 0.03 if dry else _affordable(4.0, device, Path(folder))
        raw_gib = min(gib, 1.0)
        with RawWriter(Path(folder) / "raw", int(raw_gib * _GIB), source_bytes=_GIB // 4) as raw:
            say("raw", gib=raw_gib, durable_s=round(raw.once(), 3))
        training = adamw_training(int(gib * _GIB), num_tensors=_TENSORS, device=device)
        work = Work(0.05 if dry else 0.25, device=device)
        with contextlib.ExitStack() as stack:
            arms = Arms(Path(folder), training, int(gib * _GIB), work, stack)
            say("slots", gib=gib, slots_s=round(arms.ours.await_slots(), 3))
            num_rounds = 2 if dry else _ROUNDS
            arms.run(num_rounds, until_s=began_s + _SECONDS)
            arms.compare()


def _affordable(gib: float, device: torch.device, folder: Path) -> float:
    """This size, or half of it, and so on: what memory and disk have room for."""
    needs = {"copies": _COPIES, "on_device": _ON_DEVICE, "on_disk": _ON_DISK}
    while why_not := shortage(int(gib * _GIB), device, folder, **needs):
        say("smaller", gib=gib, why=why_not)
        gib /= 2
    return gib


class Arms:
    """The savers of one training, each made when it first saves, and closed in the end."""

    def __init__(
        self,
        folder: Path,
        training: Training,
        num_bytes: int,
        work: Work,
        stack: contextlib.ExitStack,
    ) -> None:
        self._folder, self._training, self._num_bytes = folder, training, num_bytes
        self._work, self._stack = work, stack
        self.ours = Ours(folder / "ours", training)
        stack.callback(self.ours.close)
        self._recent_s: deque[float] = deque(maxlen=9)
        self._others: dict[str, Saver] = {}
        self._took_s: dict[str, float] = {}
        self._saves: defaultdict[str, list[dict[str, float]]] = defaultdict(list)

    def run(self, num_rounds: int, *, until_s: float) -> None:
        """Every arm once a round, as long as there is time; a library that fails is left out."""
        on_device = next(self._training.model.parameters()).is_cuda
        places = SnapshotPlace if on_device else [SnapshotPlace.HOST]
        calls: dict[str, Callable[[], dict[str, float]]] = {
            f"checkfreq, {place.value}": partial(self._ours, place) for place in places
        }
        calls |= {name: partial(self._other, name) for name in _OTHERS}
        for number in range(num_rounds):
            for name, call in list(calls.items()):
                began_s = time.monotonic()
                longest_s = max(self._took_s.values(), default=0.0)
                if began_s + self._took_s.get(name, longest_s) > until_s:
                    say("left out", arm=name, round=number, why="no time is left")
                    continue
                try:
                    self._saves[name].append(call())
                    say("save", arm=name, round=number, **self._saves[name][-1])
                except Exception as error:
                    if name not in _OTHERS:
                        raise
                    say("left out", arm=name, round=number, why=f"{type(error).__name__}: {error}")
                    del calls[name]
                self._took_s[name] = time.monotonic() - began_s

    def compare(self) -> None:
        """Print how ours compares, of the arms whose last save was not their first."""
        latest = {name: saves[-1] for name, saves in self._saves.items() if len(saves) > 1}
        others = {name: one for name, one in latest.items() if name in _OTHERS}
        for figure in ("held_ms", "durable_s") if others else ():
            best = min(others, key=lambda name: others[name][figure])
            for name in sorted(latest.keys() - others.keys()):
                ratio = latest[name][figure] / others[best][figure]
                say("ratio", arm=name, figure=figure, best_other=best, ratio=round(ratio, 4))

    def _ours(self, place: SnapshotPlace) -> dict[str, float]:
        self.ours.place = place
        waited_s = self.ours.waited_s
        figures = self._saved(self.ours)
        self.ours.boundary(save=False)  # what the device waited is known by now
        return {
            **figures,
            "waited_ms": round((self.ours.waited_s - waited_s) * 1e3, 3),
            "ok": self.ours.was_on_device == (place is SnapshotPlace.DEVICE),
        }

    def _other(self, name: str) -> dict[str, float]:
        if name not in self._others:
            if name == _SHARING and shutil.disk_usage("/dev/shm").free < 1.1 * self._num_bytes:
                raise MemoryError("/dev/shm has no room for the state")
            saver = self._others[name] = PEERS[name].make(self._folder / name, self._training)
            self._stack.callback(saver.close)
        figures = self._saved(self._others[name])
        self._others[name].discard()
        return figures

    def _saved(self, saver: Saver) -> dict[str, float]:
        def change() -> None:
            write_to_all(self._training)

        self._recent_s.append(iterate(saver, change, self._work).total_s)
        seconds = sample(saver, change, self._work, clean_iterations=1, recent_s=self._recent_s)
        return shown(seconds)


if __name__ == "__main__":
    main()
