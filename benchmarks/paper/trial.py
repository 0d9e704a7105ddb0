"""One model of `benchmarks.paper`, from AUTO's choice to a restore: all measurements."""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lab.estimate import undisturbed
from benchmarks.lab.overheads import Measured
from benchmarks.lab.paired import FrozenArm, Round, clean_window, rounds
from benchmarks.lab.rawio import RawWriter, drop_from_cache
from benchmarks.lab.training import Loop
from benchmarks.lab.warm_up import warmed_up
from benchmarks.paper.recording import CheckpointCosts, RecordingArm, WindowRecord
from benchmarks.paper.workloads import Workload
from checkfreq.types import SnapshotPlace

if TYPE_CHECKING:
    from checkfreq.examples.imagenet.images import Stream

#: Fractions of a model's time: until AUTO's warm-up, and until the windows are over.
_SETTLE, _WINDOWS = 0.35, 0.8
#: A window is whole intervals, and at least so long. Where a checkpoint is durable within half an
#: interval, it is cut after twice that time.
_WINDOW_S = 0.5
#: Fewer rounds give no confidence interval; undisturbed ones are waited for, up to a limit.
_MIN_ROUNDS, _PATIENCE = 3, 1.6
#: Checkpoints that training waits for; restores, and raw writes; fewer for a large state.
_STILL, _REPEATS = 4, 3
#: Bytes of all raw writes together, unless one is more; and how many of them are made.
_RAW_BYTES, _SOURCE_BYTES = 4 << 30, 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """AUTO's interval, its reason, and the statistics behind it."""

    steps: int
    reason: str
    predicted_overhead: float
    durable_s: float
    place: SnapshotPlace

    def window(self, *, iteration_s: float) -> int:
        """The iterations of a window."""
        whole = max(self.steps, math.ceil(_WINDOW_S / iteration_s))
        cut = math.ceil(max(2 * self.durable_s, _WINDOW_S) / iteration_s)
        return cut if cut < self.steps else whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The chosen interval in windows. Seconds; ``held_s`` and ``wait_s`` are per checkpoint.

    All but ``still_s`` are from undisturbed rounds.
    """

    overhead: Measured
    checkpoints: int
    persist_s: float
    durable_s: float
    held_s: float
    wait_s: float
    still_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """One model. Seconds and bytes, all measured."""

    chosen: Chosen
    windows: Windows
    restore_s: list[float]
    raw_write_s: float
    num_parameters: int
    state_bytes: int
    epoch_iterations: int | None

    @property
    def iteration_s(self) -> float:
        """The iteration time in the windows without a manager."""
        return self.windows.overhead.iteration_s


class Trial:
    """Measures one workload in about ``args.seconds``."""

    def __init__(self, workload: Workload, scratch: Path, args: argparse.Namespace) -> None:
        self._workload, self._scratch, self._args = workload, scratch, args
        self._began_s = time.perf_counter()
        self._stream = None if args.data is None else self._images()

    def _images(self) -> Stream:
        from checkfreq.examples.imagenet.images import Stream  # torchvision is optional

        return Stream.of(
            self._args.data,
            image_size=self._workload.image_size,
            batch=self._workload.batch,
            workers=self._args.workers,
            seed=self._args.seed,
        )

    def measure(self) -> Measurements:
        """Choose an interval, train in windows, restore, write raw."""
        loop = self._loop(seed=self._args.seed)
        clean_window(loop, 5)
        chosen = self._choose(loop)
        windows, state_bytes = self._windows(loop, chosen)
        expected, num_parameters = fingerprint(loop), loop.num_parameters
        del loop
        gc.collect()  # free its memory for the new model
        return Measurements(
            chosen=chosen,
            windows=windows,
            restore_s=self._restore(expected, self._repeats(_REPEATS, windows.durable_s, parts=2)),
            raw_write_s=self._raw_write_s(state_bytes, windows.durable_s),
            num_parameters=num_parameters,
            state_bytes=state_bytes,
            epoch_iterations=self._stream and self._stream.batches_per_epoch,
        )

    def _loop(self, *, seed: int) -> Loop:
        if self._stream is None:
            return self._workload.loop(seed=seed)
        batches, num_classes = self._stream.batches, self._stream.num_classes
        return self._workload.loop(seed=seed, source=batches, num_classes=num_classes)

    def _choose(self, loop: Loop) -> Chosen:
        folder = self._scratch / "auto"
        manager = loop.manager(folder, max_overhead=self._args.bound)
        with contextlib.closing(warmed_up(loop, manager, at_most_s=_SETTLE * self._args.seconds)):
            stats = manager.stats()
        shutil.rmtree(folder)
        return Chosen(
            steps=stats["interval_steps"],
            reason=str(stats["reason"]),
            predicted_overhead=stats["predicted_overhead"],
            durable_s=stats["durable_s"],
            place=SnapshotPlace(stats["place"]),
        )

    @property
    def _used(self) -> float:
        """The time left for this model."""
        return (time.perf_counter() - self._began_s) / self._args.seconds

    def _repeats(self, most: int, each_s: float, *, parts: int) -> int:
        """How often something can be repeated, if ``parts`` share the remaining time.

        At least once, however long it takes.
        """
        share_s = (1 - self._used) * self._args.seconds / parts
        return max(1, min(most, int(share_s / each_s)))

    def _raw_write_s(self, num_bytes: int, each_s: float) -> float:
        most = min(_REPEATS, max(1, _RAW_BYTES // num_bytes))
        return raw_write_s(self._scratch, num_bytes, self._repeats(most, each_s, parts=1))

    # ---- windows

    def _windows(self, loop: Loop, chosen: Chosen) -> tuple[Windows, int]:
        """Measure the interval, and the bytes of a checkpoint; the last one is taken at the end."""
        length = chosen.window(iteration_s=clean_window(loop, 3).iteration_s)
        folder = self._scratch / "frozen"
        arm = FrozenArm(loop, folder, interval=chosen.steps, length=length, place=chosen.place)
        with contextlib.closing(arm):
            arm.warm_up()
            recorded = RecordingArm(arm)
            done, seconds = self._rounds(loop, recorded)
            found = CheckpointCosts.of(kept(recorded.records, done), folder)
            taken, state_bytes = arm.taken, arm.manager.stats()["state_bytes"]
            durable_s = statistics.median(_durable_s(each, arm) for each in found.events)
            num_still = self._repeats(_STILL, durable_s, parts=3)
            still_s = [arm.stand_still() for _ in range(num_still)]
        windows = Windows(
            overhead=Measured.of("auto", done, seconds=seconds, taken=taken),
            checkpoints=found.checkpoints,
            persist_s=statistics.median(each["persist_s"] for each in found.events),
            durable_s=durable_s,
            held_s=found.held_s,
            wait_s=found.wait_s,
            still_s=still_s,
        )
        return windows, state_bytes

    def _rounds(self, loop: Loop, arm: RecordingArm) -> tuple[list[Round], float]:
        """Measure rounds; returns them and how long they took."""
        start_s, used, done = time.perf_counter(), self._used, list[Round]()
        for each in rounds(loop, {"auto": arm}, random.Random(self._args.seed)):
            done.append(each)
            if self._are_enough(done, one_more=(self._used - used) / len(done)):
                break
        return done, time.perf_counter() - start_s

    def _are_enough(self, done: Sequence[Round], *, one_more: float) -> bool:
        """Whether there is time: ``one_more`` round takes that fraction of it."""
        num_kept = sum(undisturbed([each.foreign for each in done]))
        is_patient = num_kept < _MIN_ROUNDS and self._used + one_more < _PATIENCE
        return self._used > _WINDOWS and len(done) >= _MIN_ROUNDS and not is_patient

    # ---- restore

    def _restore(self, expected: list[int], repeats: int) -> list[float]:
        """Seconds of restores into a model with different weights, each by a new manager."""
        loop = self._loop(seed=self._args.seed + 1)
        seconds = []
        for _ in range(repeats):
            drop_from_cache(x for x in self._scratch.rglob("*") if x.is_file())
            loop.synchronize()
            start_s = time.perf_counter()
            with contextlib.closing(loop.manager(self._scratch / "frozen", interval=0)) as manager:
                manager.restore()
                loop.synchronize()
                seconds.append(time.perf_counter() - start_s)
            if fingerprint(loop) != expected:
                raise SystemExit(f"{self._workload.model}: what was restored is not what was saved")
        return seconds


def kept(records: Sequence[WindowRecord], done: Sequence[Round]) -> list[WindowRecord]:
    """The records of the rounds that `Measured` counts: one of each."""
    keep = undisturbed([each.foreign for each in done])
    return [each for each, is_kept in zip(records, keep, strict=True) if is_kept]


def _durable_s(event: dict[str, Any], arm: FrozenArm) -> float:
    """The time from a boundary until its checkpoint is durable."""
    return float(event["durable_monotonic_s"] - arm.boundaries_s[event["step"]])


def fingerprint(loop: Loop) -> list[int]:
    """Sums of the bits of each tensor of model and optimizer, 64 at a time."""
    states = loop.optimizer.state.values()
    tensors = [*loop.model.state_dict().values(), *(x for state in states for x in state.values())]
    return [_sum(x) for x in tensors if isinstance(x, torch.Tensor)]


def _sum(tensor: torch.Tensor) -> int:
    in_bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(in_bytes) // 8 * 8
    return int(in_bytes[:whole].view(torch.int64).sum()) + int(in_bytes[whole:].sum())


def raw_write_s(folder: Path, num_bytes: int, repeats: int) -> float:
    """Seconds to write that many bytes directly and sync them: P if only the disk counted."""
    path = folder / ".raw-write"
    with RawWriter(path, num_bytes, source_bytes=_SOURCE_BYTES) as writer:
        return statistics.median(writer.once() for _ in range(repeats))
