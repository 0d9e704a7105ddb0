"""The story that events tell: runs, and in each the checkpoints, restores, troubles. Pure.

A run is one process that trains (rank 0's, of many). It begins with ``began``, or with the
``restored`` before that; in a directory of an earlier version, or if the beginning of the file was
replaced, with the first event there is. It ends with ``ended``, or with ``killed``, which its
worker records; with neither the worker was killed too, or it goes on. What a worker does after its
trainer's death belongs to the run of that trainer.

Events are data from outside: a field of the wrong type counts as missing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from checkfreq.policy.failure_rate import FailureRate, rate_from

#: What a worker still reports when its trainer has gone, or the manager is closed.
_AFTERMATH = frozenset(
    ("killed", "memory_kept", "memory_given_up", "uploaded", "mirror_failing", "mirror_refused",
     "pruned")
)  # fmt: skip
#: Troubles, and what is shown of each: the field that says it.
_SAID_BY = {
    "failed": "error",
    "quarantined": "reason",
    "worker_died": "error",
    "retaken": "message",
    "trouble": "message",
    "mirror_failing": "error",
    "mirror_refused": "holder",
    "memory_given_up": "why",
    "notice": "text",
    "stop": "signal",
    "deferred": "why",
}
TROUBLES = ("failed", "quarantined", "worker_died", "retaken", "trouble", "mirror_failing",
            "mirror_refused", "ranks differ")  # fmt: skip
_MOST_TEXT = 2000


@dataclass(slots=True)
class Save:
    """One durable checkpoint. Times are Unix seconds or seconds; None is not known.

    ``told_s``: when the trainer learned of it, at ``at_step``. ``overhead``: what checkpoints had
    added to the run by then, a fraction. ``by_worker``: committed after the trainer's death.
    """

    step: int
    told_s: float
    reason: str = ""
    at_step: int | None = None
    num_bytes: int = 0
    written_bytes: int = 0
    stall_s: float | None = None
    copy_s: float | None = None
    write_s: float | None = None
    persist_s: float | None = None
    started_monotonic_s: float | None = None
    durable_monotonic_s: float | None = None
    interval_steps: int | None = None
    iteration_s: float | None = None
    overhead: float | None = None
    expected_loss_s: float | None = None
    bytes_per_s: float | None = None
    by_worker: bool = False


@dataclass(slots=True, frozen=True)
class PlanChange:
    """The interval is ``interval_steps`` from now on, for ``reason`` (a term of the policy)."""

    at_s: float
    step: int
    interval_steps: int | None
    reason: str
    explanation: str
    iteration_s: float | None
    overhead: float | None
    expected_loss_s: float | None


@dataclass(slots=True, frozen=True)
class Upload:
    """A checkpoint that is in the mirror; ``upload_s`` before ``at_s`` it began."""

    at_s: float
    step: int
    num_bytes: int
    upload_s: float | None


@dataclass(slots=True, frozen=True)
class Note:
    """Any other event: its kind, and what it says."""

    at_s: float
    kind: str
    step: int
    text: str


@dataclass(slots=True, frozen=True)
class Restore:
    """Training goes on from ``step``. ``steps_skipped``: newer ones did not validate."""

    at_s: float
    step: int
    source: str
    steps_skipped: int
    was_chosen: bool


@dataclass(slots=True)
class Run:
    """One run. ``how``: how it ended, "" if nobody said; ``ended_by``: by which exception.

    ``last_s``: the last sign of its trainer, or the trainer's death if a worker recorded that.
    ``seen``: how often runs before it had failed, as it knew.
    """

    number: int
    began_s: float
    last_s: float
    has_begun: bool = False
    first_step: int | None = None
    world: int = 1
    host: str = ""
    mode: str = ""
    max_overhead: float | None = None
    manual_interval: int | None = None
    restore: Restore | None = None
    saves: list[Save] = field(default_factory=list)
    plans: list[PlanChange] = field(default_factory=list)
    uploads: list[Upload] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    how: str = ""
    ended_by: str = ""
    seen: FailureRate | None = None
    is_finished: bool = False
    reached_step: int = 0
    _offset_s: float | None = None

    @property
    def own_saves(self) -> Iterator[Save]:
        """Checkpoints that this run's trainer took, and whose costs it measured."""
        return (save for save in self.saves if save.started_monotonic_s is not None)

    def started_s(self, save: Save) -> float:
        """When the snapshot of a checkpoint was begun: the instant of its boundary."""
        return self._unix(save.started_monotonic_s, save.told_s)

    def durable_s(self, save: Save) -> float:
        """When a checkpoint was committed."""
        return self._unix(save.durable_monotonic_s, save.told_s)

    def _unix(self, monotonic_s: float | None, otherwise: float) -> float:
        if monotonic_s is None or self._offset_s is None:
            return otherwise
        return monotonic_s + self._offset_s

    @property
    def stall_s(self) -> float:
        """How long its checkpoints held training."""
        return math.fsum(save.stall_s or 0.0 for save in self.saves)

    @property
    def written_bytes(self) -> int:
        """What it wrote to storage."""
        return sum(save.written_bytes for save in self.saves)

    @property
    def overhead(self) -> float | None:
        """The latest measured overhead, a fraction."""
        return next((s.overhead for s in reversed(self.saves) if s.overhead is not None), None)

    @property
    def iteration_s(self) -> float | None:
        """Seconds per iteration without checkpoints, as measured last."""
        known = [save.iteration_s for save in reversed(self.saves[-3:])]
        known += [plan.iteration_s for plan in self.plans[-1:]]
        return next((value for value in known if value), None)

    @property
    def _first(self) -> int:
        return self.first_step or (self.restore.step if self.restore else 0)

    @property
    def last_known(self) -> tuple[float, int]:
        """The latest instant of which an event tells how far training was, and the step."""
        told = [(self.began_s, self._first)]
        told += [(plan.at_s, plan.step) for plan in self.plans[-1:]]
        own = (save for save in reversed(self.saves) if save.at_step is not None)
        told += [(save.told_s, save.at_step or 0) for save in islice(own, 1)]
        return max(told)

    @property
    def step_s(self) -> float | None:
        """Seconds per iteration with its checkpoints: as measured, else by the clock."""
        if self.iteration_s:
            return self.iteration_s * (1.0 + (self.overhead or 0.0))
        at_s, step = self.last_known
        num = step - self._first
        return (at_s - self.began_s) / num if num > 0 and at_s > self.began_s else None

    def add_save(self, save: Save) -> None:
        """A checkpoint is durable."""
        self.saves.append(save)
        if save.durable_monotonic_s is not None:
            # The trainer hears of it at the next boundary: the least delay is nearly none.
            offset_s = save.told_s - save.durable_monotonic_s
            self._offset_s = min(offset_s, self._offset_s or offset_s)
        self.reached_step = max(self.reached_step, save.step, save.at_step or 0)


@dataclass(frozen=True, slots=True)
class Loss:
    """Iterations that are done again after a run ended, and goes on from an earlier step.

    At least ``least_steps``, as its events tell; at most ``most_steps``, or it would have reported
    another checkpoint. ``steps`` is the estimate: from its time of death if a worker recorded that,
    else the middle. ``work_s``: their time.
    """

    least_steps: int
    steps: int
    most_steps: int
    work_s: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether the number is known."""
        return self.least_steps == self.most_steps

    @classmethod
    def of(cls, run: Run, step: int) -> Loss:
        """What is lost of ``run`` if training goes on from ``step``."""
        step_s = run.step_s or 0.0
        least = max(0, run.reached_step - step)
        if run.how not in ("", "killed"):  # it said how far it had got
            return cls(least, least, least, least * step_s)
        most = least + _interval(run)
        steps = (least + most) // 2
        if run.how and step_s:
            at_s, known = run.last_known
            steps = known + int((run.last_s - at_s) / step_s) - step
            steps = min(most, max(least, steps))
        return cls(least, steps, most, steps * step_s)

    def __add__(self, other: Loss) -> Loss:
        return Loss(
            self.least_steps + other.least_steps,
            self.steps + other.steps,
            self.most_steps + other.most_steps,
            self.work_s + other.work_s,
        )


class Story:
    """What happened in one directory. Give it events in their order."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.num_events = 0
        self.num_odd = 0
        self.pruned = 0
        self._last_upload = -1

    def add_all(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Take in events; those without kind and time are counted as odd."""
        for event in events:
            self.add(event)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in one event."""
        kind, at_s = event.get("kind"), _number(event.get("time_unix_s"))
        step = _integer(event.get("step"))
        if not isinstance(kind, str) or at_s is None or step is None:
            self.num_odd += 1
            return
        self.num_events += 1
        run = self._run_of(kind, step, at_s, event)
        if not run.how:
            run.last_s = max(run.last_s, at_s)
        run.counts[kind] += 1
        match kind:
            case "committed":
                run.add_save(_save(event, step, at_s))
            case "plan":
                run.plans.append(_plan(event, step, at_s))
                run.reached_step = max(run.reached_step, step)
            case "began":
                _begin(run, event, step)
            case "restored":
                run.restore = _restore(event, step, at_s)
                run.reached_step = step
            case "uploaded":
                self._upload(run, event, step, at_s)
            case "ended":
                run.how = _text(event, "how") or "closed"
                run.ended_by = _text(event, "error")
                run.reached_step = max(run.reached_step, step)
            case "killed" if not run.how:
                run.how = kind
                run.reached_step = max(run.reached_step, step)
            case "finished" | "reopened":
                run.is_finished = kind == "finished"
            case "pruned":
                steps = event.get("steps")
                self.pruned += len(steps) if isinstance(steps, list) else 0
            case _:
                if kind == "failed":
                    at_risk = _integer(event.get("steps_at_risk")) or 0
                    durable = run.saves[-1].step if run.saves else run.first_step or 0
                    run.reached_step = max(run.reached_step, durable + at_risk)
                run.notes.append(Note(at_s, _short(kind), step, _text(event, _SAID_BY.get(kind))))

    @property
    def run(self) -> Run | None:
        """The latest run."""
        return self.runs[-1] if self.runs else None

    @property
    def saves(self) -> Iterator[tuple[Run, Save]]:
        """Every checkpoint that became durable, and its run."""
        return ((run, save) for run in self.runs for save in run.saves)

    def before(self, run: Run) -> Run | None:
        """The run before."""
        return self.runs[run.number - 2] if run.number > 1 else None

    def loss(self, run: Run) -> Loss | None:
        """What was lost before ``run``; None if it goes on from nothing."""
        before, restore = self.before(run), run.restore
        if before is None or restore is None or restore.was_chosen:
            return None
        return Loss.of(before, restore.step)

    @property
    def losses(self) -> list[Loss]:
        """What was lost before each run that goes on from another."""
        return [loss for run in self.runs if (loss := self.loss(run)) is not None]

    def down_s(self, run: Run) -> float:
        """How long nothing trained before ``run``: from the last sign of the run before."""
        before = self.before(run)
        began_s = run.restore.at_s if run.restore is not None else run.began_s
        return 0.0 if before is None else max(0.0, began_s - before.last_s)

    def _run_of(self, kind: str, step: int, at_s: float, event: Mapping[str, Any]) -> Run:
        """The run that an event belongs to, a new one if it begins there."""
        run = self.run
        if run is None:
            return self._new(at_s)
        if kind in _AFTERMATH or event.get("after_trainer_death"):
            return run
        if kind == "restored":
            return self._new(at_s)
        if kind == "began":
            has_only_restored = run.restore is not None and not (run.plans or any(run.own_saves))
            return run if has_only_restored and not (run.has_begun or run.how) else self._new(at_s)
        if kind not in ("committed", "plan"):
            return run
        is_again = kind == "committed" and not run.has_begun and run.saves
        return self._new(at_s) if run.how or (is_again and step <= run.saves[-1].step) else run

    def _new(self, at_s: float) -> Run:
        self.runs.append(Run(len(self.runs) + 1, at_s, at_s))
        return self.runs[-1]

    def _upload(self, run: Run, event: Mapping[str, Any], step: int, at_s: float) -> None:
        if step == self._last_upload:  # told by the trainer and, at the same time, by its worker
            return
        self._last_upload = step
        upload_s = _number(event.get("upload_s"))
        num_bytes = _integer(event.get("sent_bytes")) or 0
        run.uploads.append(Upload(at_s, step, num_bytes, upload_s))


def _interval(run: Run) -> int:
    """Iterations between two checkpoints of a run; 0 if nothing tells."""
    used = run.saves[-1].interval_steps if run.saves else None
    planned = run.plans[-1].interval_steps if run.plans else None
    return used or planned or run.manual_interval or 0


def _begin(run: Run, event: Mapping[str, Any], step: int) -> None:
    run.has_begun = True
    run.first_step = step
    run.reached_step = max(run.reached_step, step)
    run.world = _integer(event.get("world")) or 1
    run.host, run.mode = _text(event, "host"), _text(event, "mode")
    run.max_overhead = _number(event.get("max_overhead"))
    run.manual_interval = _integer(event.get("interval_steps"))
    run.seen = rate_from(event.get("failures_seen", 0), event.get("running_s"))


def _save(event: Mapping[str, Any], step: int, at_s: float) -> Save:
    costs = event.get("costs")
    if not isinstance(costs, dict):
        costs = {}
    get = event.get
    num_bytes = _integer(get("num_bytes")) or 0
    return Save(
        step,
        at_s,
        _text(event, "reason"),
        _integer(get("at_step")),
        num_bytes,
        max(0, num_bytes - (_integer(get("linked_bytes")) or 0)),
        _number(get("stall_s")),
        _number(get("copy_s")),
        _number(get("write_s")),
        _number(get("persist_s")),
        _number(get("started_monotonic_s")),
        _number(get("durable_monotonic_s")),
        _integer(costs.get("interval_steps")),
        _number(costs.get("iteration_s")),
        _number(costs.get("measured_overhead")),
        _number(costs.get("expected_loss_s")),
        _number(get("bytes_per_s")),
        get("after_trainer_death") is True,
    )


def _plan(event: Mapping[str, Any], step: int, at_s: float) -> PlanChange:
    return PlanChange(
        at_s,
        step,
        _integer(event.get("interval_steps")),
        _text(event, "reason"),
        _text(event, "explanation"),
        _number(event.get("iteration_s")),
        _number(event.get("measured_overhead")),
        _number(event.get("expected_loss_s")),
    )


def _restore(event: Mapping[str, Any], step: int, at_s: float) -> Restore:
    skipped = _integer(event.get("steps_lost")) or 0
    chosen = event.get("was_chosen") is True
    return Restore(at_s, step, _text(event, "source"), skipped, chosen)


def _number(value: object) -> float | None:
    """A finite number that is not negative, and not absurd."""
    kind = type(value)
    if (kind is float or kind is int) and 0 <= value < 1e18:  # type: ignore[operator]
        return value  # type: ignore[return-value]
    return None


def _integer(value: object) -> int | None:
    if type(value) is int and -1 <= value < 1 << 62:  # a bool is none
        return value
    return None


def _text(event: Mapping[str, Any], name: str | None) -> str:
    value = event.get(name) if name is not None else None
    return _short(value) if isinstance(value, str) else ""


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "..."
