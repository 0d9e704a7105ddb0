"""The interval that a policy comes to, alone with a loop: AUTO, or a decider in its place.

A decider is one of the simulator's (the paper's, say); our engine takes the checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper_policy import PaperTuner
from benchmarks.training import Loop
from benchmarks.windows import LiveManager, passed
from checkfreq.policy.tuner import Due, Iteration, Measured
from checkfreq.simulation.deciders import Decider

#: A policy that has no interval after its time is given so long.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Choice:
    """The interval after a while; None: none yet. ``first``: the one before any tuning."""

    k: int | None
    first: int | None = None


def auto_choice(loop: Loop, folder: Path, *, bound: float, seconds: float) -> Choice:
    """What our AUTO comes to."""
    manager = loop.manager(folder, max_overhead=bound)
    with contextlib.closing(LiveManager(loop, manager)) as live:
        live.stretch(_decided(lambda: manager.stats()["interval_steps"], seconds))
        return Choice(manager.stats()["interval_steps"])


def paper_choice(loop: Loop, folder: Path, tuner: PaperTuner, *, seconds: float) -> Choice:
    """What the paper's policy comes to."""
    decided = DecidedManager(loop, folder, tuner)
    with contextlib.closing(decided.live) as live:
        live.stretch(_decided(lambda: tuner.plan, seconds), after=decided.boundary)
    return Choice(None if tuner.plan is None else tuner.plan.interval_steps, tuner.first_steps)


def _decided(plan: Callable[[], object], seconds: float) -> Callable[[], bool]:
    """Whether so many seconds have passed, and there is a plan, or will be none."""
    is_over, is_too_late = passed(seconds), passed(seconds + _PATIENCE_S)
    return lambda: is_over() and (plan() is not None or is_too_late())


class DecidedManager:
    """A manager in MANUAL mode that checkpoints the loop when ``decider`` says so.

    The decider is told what `checkfreq.simulation` tells it: each iteration, boundary to boundary,
    and each checkpoint's times once it is durable.
    """

    def __init__(self, loop: Loop, folder: Path, decider: Decider) -> None:
        self._loop, self._folder, self._decider = loop, folder, decider
        self._manager = loop.manager(folder, interval=0)
        self.live = LiveManager(loop, self._manager)
        self._pending: tuple[int, float] | None = None
        self._last_s: float | None = None

    def boundary(self) -> None:
        """For `LiveManager.stretch`, after each of the manager's boundaries."""
        self._loop.synchronize()
        now_s = time.perf_counter()
        self._tell_ended()
        if self._last_s is not None:
            self._decider.iteration(Iteration(self._last_s, now_s))
        self._last_s = now_s
        step = self._manager.global_step
        if self._decider.due(step=step, now_s=now_s) is Due.TAKE:
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
        """What the manager noted of the last checkpoint."""
        lines = (self._folder / "events.jsonl").read_text().splitlines()
        events = [event for event in map(json.loads, lines) if event["kind"] == "committed"]
        last: dict[str, Any] = events[-1]
        return last
