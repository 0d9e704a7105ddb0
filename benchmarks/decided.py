"""Our engine, with a decider of the simulator's (the paper's, say) in the place of AUTO."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.training import Loop
from benchmarks.windows import LiveManager
from checkfreq.policy.tuner import Due, Iteration, Measured
from checkfreq.simulation.deciders import Decider


class DecidedManager:
    """A manager in MANUAL mode that checkpoints the loop when ``decider`` says so.

    The decider is told what `checkfreq.simulation` tells it: each iteration, boundary to boundary,
    and each checkpoint's times once it is durable.
    """

    def __init__(self, loop: Loop, folder: Path, decider: Decider) -> None:
        manager = loop.manager(folder, interval=0)
        self.live = LiveManager(loop, manager)
        self._loop, self._manager, self._decider = loop, manager, decider
        self._folder = folder
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
