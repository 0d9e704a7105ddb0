"""Windows of training with and without checkpoints in one process, and foreign CPU use meanwhile.

A window with checkpoints begins with nothing in flight and passes whole intervals (or the beginning
of one). Then it trains on, without boundaries, until its last persist has ended and the replaced
checkpoint is removed: no cost moves into the next window, and none is counted twice. The iterations
of that tail are compared like the others, but no checkpoints are charged to them: overhead is cost
divided by the time of whole intervals.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from benchmarks.lab.estimate import Sample, sample
from benchmarks.lab.training import Loop
from checkfreq import CFManager
from checkfreq.types import SnapshotPlace

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds and iterations, including the tail; ``covered``: iterations without it."""

    seconds: float
    iterations: int
    covered: int

    @property
    def iteration_s(self) -> float:
        """Seconds per iteration."""
        return self.seconds / self.iterations


class Hooks:
    """The current hooks of the optimizer and of all optimizers, removed except while ``attached``.

    Make it right after its manager: the next manager's hook is one of all optimizers as well.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        live = (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            _global_optimizer_pre_hooks,
            _global_optimizer_post_hooks,
        )
        self._hooks = [(hooks, dict(hooks)) for hooks in live]
        self._take_off()

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """The hooks are on the optimizer inside the block."""
        self.put_back()
        try:
            yield
        finally:
            self._take_off()

    def put_back(self) -> None:
        """Attach the hooks for good."""
        for live, own in self._hooks:
            live.update(own)

    def _take_off(self) -> None:
        for live, _ in self._hooks:
            live.clear()


def clean_window(loop: Loop, iterations: int) -> Window:
    """Train with no manager attached."""
    start_s = time.perf_counter()
    for _ in range(iterations):
        loop.iterate()
    loop.synchronize()
    return Window(time.perf_counter() - start_s, iterations, iterations)


def clean_for(loop: Loop, seconds: float) -> Window:
    """Train that long, at least one iteration, with no manager attached."""
    is_over, count = passed(seconds), 0
    start_s = time.perf_counter()
    while not count or not is_over():
        loop.iterate()
        count += 1
    loop.synchronize()
    return Window(time.perf_counter() - start_s, count, count)


def passed(seconds: float) -> Callable[[], bool]:
    """Returns a function: whether that many seconds have passed since this call."""
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s


def drain(loop: Loop, manager: CFManager) -> int:
    """Train without boundaries until no background work is left; returns the number of iterations.

    What is left may be a persist, and then the removal of the previous checkpoint.
    """
    count = 0
    pipeline = manager._pipeline
    pipeline.persistence.reap()
    while not pipeline.is_quiet:
        loop.iterate()
        pipeline.persistence.reap()
        count += 1
    return count


class Arm(Protocol):
    """An arm that is measured in windows of roughly ``iterations``."""

    iterations: int

    def window(self) -> Window:
        """Train one window, nothing in flight before it or after."""
        ...

    @property
    def taken(self) -> float | None:
        """The share of due checkpoints that were taken, if known."""
        ...

    def close(self) -> None:
        """End the manager, at a boundary."""
        ...


class FrozenArm:
    """A manager with a fixed interval, in windows of roughly ``length`` iterations.

    If ``length`` is below the interval, a window is cut short: it takes a checkpoint at its start,
    and ends after ``length`` iterations. That measures the same if the checkpoint is durable long
    before the next one is due.
    """

    def __init__(
        self,
        loop: Loop,
        folder: Path,
        *,
        interval: int,
        length: int,
        place: SnapshotPlace | None = None,
    ) -> None:
        self.interval = interval
        self._is_cut = length < interval
        self._covered = interval if self._is_cut else interval * round(length / interval)
        self.iterations = length if self._is_cut else self._covered
        self._loop = loop
        steps = 0 if self._is_cut else interval
        self.manager = loop.manager(folder, interval=steps, place=place)
        self._hooks = Hooks(loop.optimizer)
        self._committed_before = 0
        self._num_due = 0
        #: The time of each boundary by its step, on the clock of the manager's events.
        self.boundaries_s: dict[int, float] = {}

    def warm_up(self) -> None:
        """Take a checkpoint into each slot, and stop right before the next due boundary."""
        with self._hooks.attached():
            for _ in range(2):
                self._pass_one()
                self.manager.save()
                self._pass_one()
                self.manager.wait()
            while not self._is_cut and (self.manager.global_step + 1) % self.interval:
                self._pass_one()
            self.manager.wait()
        self._committed_before = self._num_committed()

    def _pass_one(self, *, save: bool = False) -> None:
        self.boundaries_s[self.manager.global_step + 1] = time.monotonic()
        self.manager.step()
        if save:
            self.manager.save()
        self._loop.iterate()

    def window(self) -> Window:
        """See Arm. It begins at the boundary of a checkpoint."""
        with self._hooks.attached():
            start_s = time.perf_counter()
            for iteration in range(self.iterations):
                self._pass_one(save=self._is_cut and iteration == 0)
            tail = drain(self._loop, self.manager)
            self._loop.synchronize()
            seconds = time.perf_counter() - start_s
        self._num_due += self._covered // self.interval
        return Window(seconds, self.iterations + tail, self._covered)

    def stand_still(self) -> float:
        """How many seconds training stops for a checkpoint if it waits until that is durable."""
        with self._hooks.attached():
            self._pass_one()
            self.manager.wait()
            self._loop.synchronize()
            start_s = time.perf_counter()
            self.manager.step()
            self.manager.save(wait=True)
            seconds = time.perf_counter() - start_s
            self._loop.iterate()
        return seconds

    @property
    def taken(self) -> float:
        """See Arm."""
        return (self._num_committed() - self._committed_before) / max(1, self._num_due)

    def _num_committed(self) -> int:
        return int(self.manager.stats()["num_committed"])

    def close(self) -> None:
        """See Arm."""
        self.manager.step()
        self.manager.close()


class LiveManager:
    """A manager that decides itself, in stretches; between two it sees the end of an epoch."""

    def __init__(self, loop: Loop, manager: CFManager) -> None:
        self.manager = manager
        self._loop = loop
        self._hooks = Hooks(loop.optimizer)

    def stretch(self, until: Callable[[], bool], after: Callable[[], None] | None = None) -> Window:
        """Train until ``until()`` holds, and then until nothing is in flight.

        ``after`` is called after each boundary; its time counts.
        """
        start_s, count = time.perf_counter(), 0
        with self._hooks.attached():
            while True:
                self._loop.iterate()
                count += 1
                if until():
                    break
                self.manager.step()
                if after is not None:
                    after()
            self.manager.end_epoch()
            tail = drain(self._loop, self.manager)
            self._loop.synchronize()
        return Window(time.perf_counter() - start_s, count + tail, count)

    def close(self) -> None:
        """End the manager, at a boundary."""
        self.manager.end_epoch()
        self.manager.close()


class LiveArm:
    """A manager that decides itself, in windows of ``length`` iterations."""

    taken = None

    def __init__(self, live: LiveManager, *, length: int) -> None:
        self.iterations = length
        self._live = live

    def window(self) -> Window:
        """See Arm. Checkpoints come when they are due, so windows differ in their number."""
        left = iter(range(self.iterations - 1, -1, -1))
        return self._live.stretch(lambda: next(left) == 0)

    def close(self) -> None:
        """See Arm."""
        self._live.close()


class ForeignCpu:
    """The share of one core used by other processes, and taken by the hypervisor.

    Own processes are this one and its descendants. For the others only time in user mode counts:
    time in the kernel, in kernel threads or in interrupts may be the writing of our own
    checkpoints, and a round must not be excluded because that was expensive.
    """

    def __init__(self) -> None:
        self._at_s, self._foreign_s = self._read()

    def share(self) -> float:
        """The share since the last call."""
        at_s, foreign_s = self._read()
        share = (foreign_s - self._foreign_s) / (at_s - self._at_s)
        self._at_s, self._foreign_s = at_s, foreign_s
        return share

    def _read(self) -> tuple[float, float]:
        line = Path("/proc/stat").read_text().partition("\n")[0]
        return time.perf_counter(), user_and_stolen_s(line) - _own_user_s()


def user_and_stolen_s(line: str) -> float:
    """Seconds in user mode plus those the hypervisor took, from the first line of /proc/stat."""
    user, nice, _system, _idle, _waiting, _irq, _softirq, steal = map(int, line.split()[1:9])
    return (user + nice + steal) * _TICK_S


def _own_user_s() -> float:
    """The user time of this process and all its descendants, ended ones included."""
    own = os.times()
    started_s = sum(_descendants_user_s(os.getpid(), _processes()))
    return own.user + own.children_user + started_s


def _descendants_user_s(pid: int, processes: Mapping[int, tuple[int, float]]) -> Iterator[float]:
    for child, (parent, user_s) in processes.items():
        if parent == pid:
            yield user_s
            yield from _descendants_user_s(child, processes)


def _processes() -> dict[int, tuple[int, float]]:
    """The parent of every process, and its time in user mode with its ended children's."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        user_s = (int(fields[11]) + int(fields[13])) * _TICK_S
        found[int(path.parent.name)] = (int(fields[1]), user_s)
    return found


@dataclass(frozen=True, slots=True)
class Round:
    """A sample per arm, the clean iteration time, and the foreign CPU share during the round."""

    samples: Mapping[str, Sample]
    iteration_s: float
    foreign: float


def rounds(loop: Loop, arms: Mapping[str, Arm], rng: random.Random) -> Iterator[Round]:
    """Endless rounds: a window of every arm in random order, with clean ones in between."""
    clean_iterations = math.ceil(sum(arm.iterations for arm in arms.values()) / len(arms))
    cpu = ForeignCpu()
    before = clean_window(loop, clean_iterations)
    while True:
        samples, clean_s = {}, []
        for name in rng.sample(sorted(arms), len(arms)):
            window = arms[name].window()
            after = clean_window(loop, clean_iterations)
            samples[name] = sample(
                seconds=window.seconds,
                iterations=window.iterations,
                covered=window.covered,
                clean_s=[before.iteration_s, after.iteration_s],
            )
            clean_s.append(after.iteration_s)
            before = after
        yield Round(samples, sum(clean_s) / len(clean_s), cpu.share())
