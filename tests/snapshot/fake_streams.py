"""Streams, events, graph captures and the helper thread of the fake device, with CUDA's rules."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import torch


class Kind(enum.Enum):
    """How a stream relates to the legacy default stream of its device.

    Work on the default stream comes after all earlier work on blocking streams, and before all
    later work on them. Streams of PyTorch's pool are independent of it.
    """

    DEFAULT = "default"
    BLOCKING = "blocking"
    INDEPENDENT = "independent"


@dataclass(eq=False)
class FakeEvent:
    index: torch.device
    is_done: bool = False
    time: int = 0


@dataclass(eq=False)
class Op:
    """A piece of work; it starts once everything in ``after`` is done."""

    run: Callable[[], object]
    after: list[FakeEvent | Op] = field(default_factory=list)
    is_event: bool = False
    is_done: bool = False

    def can_run(self) -> bool:
        return all(one.is_done for one in self.after)


@dataclass(eq=False)
class FakeStream:
    index: torch.device
    kind: Kind = Kind.INDEPENDENT
    ops: deque[Op] = field(default_factory=deque)

    def runnable(self) -> Op | None:
        """The next piece of work, if it can run."""
        return self.ops[0] if self.ops and self.ops[0].can_run() else None

    def is_ordered_with(self, other: FakeStream) -> bool:
        """Whether the device itself orders the work of the two by when it was queued."""
        kinds = {self.kind, other.kind}
        return self.index == other.index and kinds == {Kind.DEFAULT, Kind.BLOCKING}


class Capture:
    """A graph capture in progress: calls that it forbids raise, and break it for good."""

    def __init__(self, *, mode: str) -> None:
        assert mode in ("global", "thread_local", "relaxed")
        self.mode = mode
        self.broken_by: str | None = None

    def refuse_unsafe(self, call: str, *, in_training: bool, is_relaxed: bool) -> None:
        """Raise if ``call``, which a capture may forbid, is forbidden to the calling thread."""
        forbidden = self.mode == "global" or (self.mode == "thread_local" and in_training)
        if forbidden and not is_relaxed:
            self.refuse(call)

    def refuse(self, call: str) -> NoReturn:
        self.broken_by = self.broken_by or call
        raise RuntimeError(f"{call}: operation not permitted when stream is capturing")


class ScheduledHelper:
    """Tasks that run when the schedule says so; see Helper."""

    def __init__(self, *, prepare: Callable[[], None]) -> None:
        self.is_running = False
        self._prepare: Callable[[], None] | None = prepare
        self._jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def close(self, *, timeout_s: float) -> bool:
        while self._jobs:
            self._run()
        return True

    def run_newest(self, count: int) -> None:
        """Run the tasks that were submitted last before all others."""
        self._jobs.rotate(count)
        for _ in range(count):
            self._run()

    def actors(self) -> list[Callable[[], None]]:
        return [self._run] if self._jobs and not self.is_running else []

    def _run(self) -> None:
        self.is_running = True
        try:
            if self._prepare is not None:
                self._prepare()
                self._prepare = None
            self._jobs.popleft()()
        finally:
            self.is_running = False
