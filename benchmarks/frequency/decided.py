"""The interval that a policy chooses for a loop: AUTO, or a decider in its place.

A decider is one of the simulator's (the paper's, for example); our engine takes the checkpoints.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab.events import events
from benchmarks.lab.paired import LiveManager, passed
from benchmarks.lab.paper_policy import PaperTuner
from benchmarks.lab.training import Loop
from benchmarks.lab.warm_up import CHECKPOINTS
from checkfreq.policy.tuner import Iteration, Measured, Verdict
from checkfreq.simulation.deciders import Decider
from checkfreq.types import SnapshotPlace

#: How much longer a policy that has no interval yet may take.
_PATIENCE_S = 60.0
#: Windows (from one checkpoint to the next) after which a policy has had enough time.
_WINDOWS = 8
#: The end of events.jsonl that is read: it contains the last commit.
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Choice:
    """The interval after a while, None if there is none; ``first`` is the one before any tuning.

    ``windows``: how many windows the policy had for tuning. ``place``: where snapshots are taken.
    """

    k: int | None
    windows: int
    first: int | None = None
    place: SnapshotPlace = SnapshotPlace.HOST


def auto_choice(loop: Loop, folder: Path, *, bound: float, seconds: float) -> Choice:
    """The interval AUTO has chosen after its warm-up, or after that many seconds."""
    manager = loop.manager(folder, max_overhead=bound)
    planned_at: int | None = None

    def num_windows() -> int | None:
        nonlocal planned_at
        stats = manager.stats()
        if planned_at is None and stats["interval_steps"] is not None:
            planned_at = stats["num_committed"]
        return None if planned_at is None else int(stats["num_committed"]) - planned_at

    with contextlib.closing(LiveManager(loop, manager)) as live:
        live.stretch(is_decided(num_windows, at_most=CHECKPOINTS, seconds=seconds))
        stats = manager.stats()
        return Choice(
            stats["interval_steps"], num_windows() or 0, place=SnapshotPlace(stats["place"])
        )


def paper_choice(loop: Loop, folder: Path, tuner: PaperTuner, *, seconds: float) -> Choice:
    """The interval of the paper's policy when its tuning has ended, or after that many seconds."""

    def num_windows() -> int | None:
        if tuner.plan is None:
            return None
        return tuner.num_windows if tuner.is_tuning else _WINDOWS

    decided = DecidedManager(loop, folder, tuner)
    with contextlib.closing(decided.live) as live:
        until = is_decided(num_windows, at_most=_WINDOWS, seconds=seconds)
        live.stretch(until, after=decided.boundary)
    k = None if tuner.plan is None else tuner.plan.interval_steps
    return Choice(k, tuner.num_windows, first=tuner.first_steps)


def is_decided(
    num_windows: Callable[[], int | None], *, at_most: int, seconds: float
) -> Callable[[], bool]:
    """Whether a policy has had ``at_most`` windows, or ``seconds``, or no interval in a minute.

    ``num_windows``: None before there is an interval.
    """
    is_over, is_too_late = passed(seconds), passed(seconds + _PATIENCE_S)

    def decided() -> bool:
        num = num_windows()
        return is_too_late() if num is None else num >= at_most or is_over()

    return decided


class DecidedManager:
    """A manager in MANUAL mode that checkpoints the loop when ``decider`` says so.

    The decider gets the same input as in `checkfreq.simulation`: each iteration from boundary to
    boundary, and the times of each checkpoint once it is durable. The time to pass it on is not
    counted.
    """

    def __init__(self, loop: Loop, folder: Path, decider: Decider) -> None:
        self._loop, self._folder, self._decider = loop, folder, decider
        self._manager = loop.manager(folder, interval=0)
        self.live = LiveManager(loop, self._manager)
        self._pending: tuple[int, float] | None = None
        self._last_s: float | None = None

    def boundary(self) -> None:
        """Called by `LiveManager.stretch` after each boundary of the manager."""
        self._loop.synchronize()
        ended_s = time.perf_counter()
        self._tell_ended()
        if self._last_s is not None:
            self._decider.iteration(Iteration(self._last_s, ended_s))
        self._last_s = now_s = time.perf_counter()
        step = self._manager.global_step
        if self._decider.due(step=step, now_s=now_s) is Verdict.TAKE:
            self._decider.started(str(step), step=step, start_s=now_s, is_periodic=True)
            self._pending = (step, now_s)
            self._manager.save()

    def _tell_ended(self) -> None:
        if self._pending is None:
            return
        step, start_s = self._pending
        if self._manager.stats()["last_durable_step"] != step:
            return
        event = self._committed()
        end_s = event["durable_monotonic_s"]
        measured = Measured(
            copy_s=event["copy_s"],
            persist_s=event["persist_s"],
            durable_s=end_s - start_s,
            state_bytes=event["num_bytes"],
        )
        self._decider.ended(str(step), end_s=end_s, measured=measured)
        self._pending = None

    def _committed(self) -> dict[str, Any]:
        """The event of the last committed checkpoint."""
        return events(self._folder, "committed", last_bytes=_TAIL_BYTES)[-1]
