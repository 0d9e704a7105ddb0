"""What it costs a training run to be watched, and to have its figures exported.

    python -m benchmarks.watch --rounds 24

One run with checkpoints trains window after window, each with the same number of iterations and of
checkpoints. In every round each arm has one window, in random order: ``none``; the same again,
which shows what can be told at all; ``watch``, a look each second; ``watch --http``, with
``/metrics`` scraped each second; ``watch --textfile``; ``TensorBoard``, by
``CFConfig.summary_writer``. An arm's ratio is its time over that of ``none`` in the same round: the
median, and its 95 % interval (``low``, ``high``). ``processor`` is the same of the processor time
that the training process takes, all its threads, which other work on the machine changes less.
``busy`` is the processor time of the watching process, a share of one core. ``stalls_ms``: how long
checkpoints of the arm held training, in the median.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from benchmarks.lab.estimate import median_interval
from benchmarks.lab.record import emit
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from checkfreq.config import ScalarWriter

_SCRAPE = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1] + "metrics", timeout=30).read()
    time.sleep(1.0)
"""
_WATCH = (sys.executable, "-m", "checkfreq.cli", "watch")


class Switched:
    """A summary writer that hands values on while it is told to."""

    def __init__(self) -> None:
        self.target: ScalarWriter | None = None

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """See `checkfreq.config.ScalarWriter`."""
        if self.target is not None:
            self.target.add_scalar(tag, scalar_value, global_step)


class Run:
    """A small model on one thread, with a checkpoint every ``every`` iterations."""

    def __init__(self, folder: Path, writer: Switched, *, every: int, width: int) -> None:
        self._model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._x = torch.randn(64, width)
        self._y = torch.randint(0, 10, (64,))
        self._chk_dir = folder / "chk"
        self.manager = CFManager(
            self._chk_dir,
            CFCheckpoint(model=self._model, optimizer=self._optimizer),
            mode=CFMode.MANUAL,
            chk_freq=every,
            config=CFConfig(summary_writer=writer),
        )

    def iterate(self, count: int) -> float:
        """Seconds."""
        start_s = time.perf_counter()
        for _ in range(count):
            nn.functional.cross_entropy(self._model(self._x), self._y).backward()
            self.manager.weight_update()
            self._optimizer.zero_grad()
            self.manager.step()
        return time.perf_counter() - start_s


@dataclass(slots=True)
class Arm:
    """``attached`` has the exporter running inside of it, and gives the processes that it is."""

    attached: Callable[[], AbstractContextManager[list[int]]]
    seconds: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)


def main() -> None:
    """Print a line per arm."""
    args = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="watch-") as name:
        folder, writer = Path(name), Switched()
        run = Run(folder, writer, every=args.every, width=args.width)
        with run.manager:
            run.iterate(2 * args.every)
            arms = _arms(folder, writer)
            for _ in range(args.rounds):
                for arm in random.sample(list(arms), len(arms)):
                    _window(run, arms[arm], args.iterations)
        for name, arm in arms.items():
            _report(name, arm, arms["none"], folder, args)


def _window(run: Run, arm: Arm, iterations: int) -> None:
    with arm.attached() as pids:
        run.manager.wait()
        busy_s, start_s = _busy_s(pids), time.perf_counter()
        held_s = run.manager.stats()["stall_s"]
        processor_s = time.process_time()
        arm.seconds.append(run.iterate(iterations))
        arm.processor_s.append(time.process_time() - processor_s)
        lasted_s = time.perf_counter() - start_s
        arm.busy.append((_busy_s(pids) - busy_s) / lasted_s)
        arm.stalls_s.append(run.manager.stats()["stall_s"] - held_s)


def _report(name: str, arm: Arm, none: Arm, folder: Path, args: argparse.Namespace) -> None:
    ratio, low, high = _against(arm.seconds, none.seconds)
    processor, processor_low, processor_high = _against(arm.processor_s, none.processor_s)
    emit(
        "watch",
        arm=name,
        folder=folder,
        packages=("tensorboard",),
        rounds=args.rounds,
        iterations=args.iterations,
        every=args.every,
        iteration_ms=round(1e3 * statistics.median(arm.seconds) / args.iterations, 3),
        processor_ms=round(1e3 * statistics.median(arm.processor_s) / args.iterations, 3),
        ratio=ratio,
        low=low,
        high=high,
        processor=processor,
        processor_low=processor_low,
        processor_high=processor_high,
        busy=round(statistics.median(arm.busy), 4),
        stalls_ms=round(1e3 * statistics.median(arm.stalls_s), 2),
    )


def _against(ours: list[float], theirs: list[float]) -> tuple[float, float | None, float | None]:
    """The median over the rounds of ours / theirs, and its 95 % interval if that is known."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    ratio = round(statistics.median(ratios), 4)
    if ours is theirs or len(ratios) < 6:
        return ratio, None, None
    return ratio, round(low, 4), round(high, 4)


def _arms(folder: Path, writer: Switched) -> dict[str, Arm]:
    chk_dir = str(folder / "chk")

    @contextlib.contextmanager
    def nothing() -> Iterator[list[int]]:
        yield []

    @contextlib.contextmanager
    def tensorboard() -> Iterator[list[int]]:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "scalars")) as target:  # type: ignore[no-untyped-call]
            writer.target = target
            yield []
            writer.target = None

    @contextlib.contextmanager
    def http() -> Iterator[list[int]]:
        with _started([*_WATCH, "--http", "0", chk_dir]) as (watch, url):
            scrape = subprocess.Popen([sys.executable, "-c", _SCRAPE, url])
            try:
                yield [watch]
            finally:
                scrape.kill()
                scrape.wait()

    @contextlib.contextmanager
    def textfile() -> Iterator[list[int]]:
        path = folder / "checkfreq.prom"
        path.unlink(missing_ok=True)
        command = [*_WATCH, "--every", "1", "--textfile", str(path), chk_dir]
        process = subprocess.Popen(command)
        try:
            while not path.exists():
                time.sleep(0.01)
            yield [process.pid]
        finally:
            process.kill()
            process.wait()

    @contextlib.contextmanager
    def watch() -> Iterator[list[int]]:
        with _started([*_WATCH, "--every", "1", chk_dir]) as (pid, _):
            yield [pid]

    return {
        "none": Arm(nothing),
        "none, again": Arm(nothing),
        "watch": Arm(watch),
        "watch --http, scraped": Arm(http),
        "watch --textfile": Arm(textfile),
        "TensorBoard": Arm(tensorboard),
    }


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[tuple[int, str]]:
    """A process that has said its first line, and that line; killed at the end."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def _busy_s(pids: list[int]) -> float:
    """The processor time that processes have taken."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return 1e-9 * sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--iterations", type=int, default=1200, help="of a window")
    parser.add_argument("--every", type=int, default=200, help="iterations of an interval")
    parser.add_argument("--width", type=int, default=512, help="of the model's layers")
    parser.add_argument("--folder", default=".", help="a folder on the disk to use")
    return parser.parse_args()
