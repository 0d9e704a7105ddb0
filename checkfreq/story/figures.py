"""How a run is doing now, from its story and the time. Pure.

Between two events nobody says how far training is: nothing in ``step()`` writes a file. The step is
then estimated from the last one known and the measured iteration time, and marked so.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import Enum

from checkfreq.persist.frames import Status
from checkfreq.story.model import Loss, Run, Save, Story
from checkfreq.types import Json

#: No news for so many times as long as was to be expected: something is wrong.
_PATIENCE = 3.0
_LEAST_PATIENCE_S = 30.0
#: Without a measured interval: a new run is silent for some time.
_BEFORE_FIRST_S = 3600.0


class State(Enum):
    """What the run does."""

    TRAINING = "training"
    SILENT = "silent"
    KILLED = "killed"
    CLOSED = "closed"
    FAILED = "failed"
    STOPPED = "stopped"
    FINISHED = "finished"
    NONE = "no run yet"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a live view shows. None: not known. Steps are iterations, ``overhead`` a fraction.

    step: how far training is; ``is_estimated``: nobody said so, it follows from the time.
    being_written_step: a checkpoint of which files are there, without a commit.
    next_due_step, next_due_in_s: the next periodic checkpoint, as the interval has it.
    at_risk_steps, at_risk_s: what would be lost if the machine died now.
    expected_loss_s: what a failure costs on average, at this interval.
    lost_steps: iterations that the kill cost, estimated, if the run is started again now.
    memory_step: what the killed run's worker holds in memory_bytes, for memory_left_s more.
    bytes_per_s: of the last checkpoint, from its start in the worker to its commit.
    quiet_s: since the last event. The ``num_`` figures count over all runs that are recorded.
    """

    state: State
    at_unix_s: float
    run: int = 0
    world: int | None = None
    step: int | None = None
    is_estimated: bool = False
    mode: str = ""
    interval_steps: int | None = None
    interval_s: float | None = None
    reason: str = ""
    iteration_s: float | None = None
    overhead: float | None = None
    max_overhead: float | None = None
    last_durable_step: int | None = None
    last_durable_unix_s: float | None = None
    last_durable_age_s: float | None = None
    being_written_step: int | None = None
    checkpoint_bytes: int | None = None
    stall_s: float | None = None
    persist_s: float | None = None
    bytes_per_s: float | None = None
    next_due_step: int | None = None
    next_due_in_s: float | None = None
    at_risk_steps: int | None = None
    at_risk_s: float | None = None
    expected_loss_s: float | None = None
    lost_least_steps: int | None = None
    lost_steps: int | None = None
    lost_most_steps: int | None = None
    memory_step: int | None = None
    memory_bytes: int | None = None
    memory_left_s: float | None = None
    uploaded_step: int | None = None
    quiet_s: float | None = None
    num_runs: int = 0
    num_committed: int = 0
    num_failed: int = 0
    num_failed_in_row: int = 0
    num_deferred: int = 0
    num_restored: int = 0
    num_workers_died: int = 0
    total_stall_s: float = 0.0
    total_written_bytes: int = 0
    total_uploaded_bytes: int = 0
    last_error: str = ""

    @property
    def used_of_bound(self) -> float | None:
        """The overhead as a part of the bound: 1.0 uses all of it."""
        if self.overhead is None or not self.max_overhead:
            return None
        return self.overhead / self.max_overhead

    def to_json(self) -> Json:
        """The figures by name, without those that are not known."""
        found = {**asdict(self), "state": self.state.value, "used_of_bound": self.used_of_bound}
        return {name: value for name, value in found.items() if value is not None and value != ""}


def figures(
    story: Story,
    *,
    now_s: float,
    is_held: bool | None,
    being_written_step: int | None = None,
    memory: Status | None = None,
) -> Figures:
    """The figures of the latest run.

    ``is_held``: whether a worker has the directory; None: unknown.
    ``being_written_step``: of the temporary directory that is there.
    ``memory``: what rank 0's worker says that it holds.
    """
    run = story.run
    if run is None:
        return Figures(State.TRAINING if is_held else State.NONE, now_s)
    pace = _Pace.of(run)
    state = _state(run, pace, now_s=now_s, is_held=is_held)
    step, is_estimated = _step(run, pace, now_s=now_s if state is State.TRAINING else None)
    last, interval = _last(run), pace.interval_steps
    durable_step = last.step if last is not None else run.restore.step if run.restore else None
    began_s = run.restore.at_s if run.restore else run.began_s
    since_s = run.started_s(last) if last is not None else began_s
    is_on = state in (State.TRAINING, State.SILENT)
    due = _next_due(step, durable_step or run.first_step or 0, interval) if is_on else None
    return Figures(
        state,
        now_s,
        run.number,
        run.world,
        step,
        is_estimated,
        run.mode,
        interval,
        None if interval is None or not pace.step_s else interval * pace.step_s,
        _reason(run),
        run.iteration_s,
        run.overhead,
        run.max_overhead,
        durable_step,
        None if last is None else run.durable_s(last),
        None if last is None else max(0.0, now_s - run.durable_s(last)),
        being_written_step if is_on else None,
        None if last is None else last.num_bytes,
        None if last is None else last.stall_s,
        None if last is None else last.persist_s,
        None if last is None else last.bytes_per_s,
        due,
        None if due is None or step is None or not pace.step_s else (due - step) * pace.step_s,
        max(0, step - (durable_step or 0)) if is_on else 0,
        max(0.0, now_s - since_s) if is_on else 0.0,
        _expected_loss_s(run),
        uploaded_step=run.uploads[-1].step if run.uploads else None,
        quiet_s=max(0.0, now_s - run.last_s),
        **(_after_kill(run, durable_step, memory) if state is State.KILLED else {}),
        **_totals(story, run),
    )


def _after_kill(run: Run, durable_step: int | None, memory: Status | None) -> Json:
    found: Json = {}
    if memory is not None:
        found = {
            "memory_step": memory.step,
            "memory_bytes": memory.num_bytes,
            "memory_left_s": memory.left_s,
        }
    newest = max(durable_step or 0, 0 if memory is None else memory.step)
    loss = Loss.of(run, newest)
    return {
        **found,
        "lost_least_steps": loss.least_steps,
        "lost_steps": loss.steps,
        "lost_most_steps": loss.most_steps,
    }


@dataclass(frozen=True, slots=True)
class _Pace:
    """How fast a run is: seconds per iteration with its checkpoints, iterations per interval."""

    step_s: float | None
    interval_steps: int | None
    durable_in_s: float

    @classmethod
    def of(cls, run: Run) -> _Pace:
        planned = run.plans[-1].interval_steps if run.plans else None
        used = run.saves[-1].interval_steps if run.saves else None
        interval = planned or used or run.manual_interval or None
        last = _last(run)
        durable_in_s = 0.0 if last is None else (last.copy_s or 0.0) + (last.persist_s or 0.0)
        return cls(run.step_s, interval, durable_in_s)

    @property
    def news_within_s(self) -> float:
        """After an event, the next one is expected within this time."""
        if not self.step_s or not self.interval_steps:
            return _BEFORE_FIRST_S
        usual_s = self.interval_steps * self.step_s + self.durable_in_s
        return max(_LEAST_PATIENCE_S, _PATIENCE * usual_s)


def _state(run: Run, pace: _Pace, *, now_s: float, is_held: bool | None) -> State:
    if run.how:
        known = {state.value: state for state in State}
        return known.get(run.how, State.CLOSED)
    if is_held is False:
        return State.KILLED
    return State.SILENT if now_s - run.last_s > pace.news_within_s else State.TRAINING


def _step(run: Run, pace: _Pace, *, now_s: float | None) -> tuple[int, bool]:
    """How far training is, and whether that is an estimate; ``now_s`` None: it does not go on."""
    at_s, step = run.last_known
    if now_s is None or not pace.step_s:
        return max(step, run.reached_step), False
    on = max(0, math.floor((now_s - at_s) / pace.step_s))
    return step + on, on > 0


def _last(run: Run) -> Save | None:
    return run.saves[-1] if run.saves else None


def _next_due(step: int, last: int, interval: int | None) -> int | None:
    if not interval:
        return None
    return last + interval * max(1, math.ceil((step - last + 1) / interval))


def _reason(run: Run) -> str:
    if run.mode == "manual":
        return "chosen by the user"
    return run.plans[-1].reason if run.plans else ""


def _expected_loss_s(run: Run) -> float | None:
    known = run.saves[-1].expected_loss_s if run.saves else None
    if known is None and run.plans:
        return run.plans[-1].expected_loss_s
    return known


def _totals(story: Story, run: Run) -> Json:
    last_s = run.saves[-1].told_s if run.saves else 0.0
    since = [note for note in run.notes if note.kind == "failed" and note.at_s > last_s]
    return {
        "num_runs": len(story.runs),
        "num_committed": sum(len(one.saves) for one in story.runs),
        "num_failed": sum(one.counts["failed"] for one in story.runs),
        "num_failed_in_row": len(since),
        "num_deferred": sum(one.counts["deferred"] for one in story.runs),
        "num_restored": sum(one.restore is not None for one in story.runs),
        "num_workers_died": sum(one.counts["worker_died"] for one in story.runs),
        "total_stall_s": math.fsum(one.stall_s for one in story.runs),
        "total_written_bytes": sum(one.written_bytes for one in story.runs),
        "total_uploaded_bytes": sum(up.num_bytes for one in story.runs for up in one.uploads),
        "last_error": since[-1].text if since else "",
    }
