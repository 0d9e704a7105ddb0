"""A directory's checkpoints as retention sees them, and who asks for the best one. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol

from checkfreq.errors import CheckFreqError
from checkfreq.policy.best import BestName, require_best
from checkfreq.policy.retention_info import CheckpointInfo
from checkfreq.store.marks import StepMark
from checkfreq.store.source import CheckpointSource


class Record(Protocol):
    """The part of a commit record that retention looks at."""

    @property
    def created_unix_s(self) -> float:
        """When the checkpoint was made."""
        ...

    @property
    def num_bytes(self) -> int:
        """The size of its payloads."""
        ...


def listed(
    store: CheckpointSource, record_of: Callable[[int], Record]
) -> dict[int, CheckpointInfo]:
    """The committed steps, ascending, without those for which ``record_of`` raises."""
    found = {}
    marks = store.marks()
    for step in store.steps():
        with contextlib.suppress(CheckFreqError, OSError):
            found[step] = info_of(step, record_of(step), marks.get(step, StepMark()))
    return found


def info_of(step: int, record: Record, mark: StepMark) -> CheckpointInfo:
    """One checkpoint, by its record and its marks."""
    return CheckpointInfo(
        step,
        keep=mark.keep,
        metrics=mark.metrics,
        created_s=record.created_unix_s,
        num_bytes=record.num_bytes,
        at_epoch_end=mark.at_epoch_end,
    )


def marked(store: CheckpointSource) -> list[CheckpointInfo]:
    """The committed steps that have marks, ascending, with nothing but their marks: no record is
    read."""
    marks = store.marks()
    return [
        CheckpointInfo(step, keep=marks[step].keep, metrics=marks[step].metrics)
        for step in store.steps()
        if step in marks
    ]


def best_in(store: CheckpointSource, name: str) -> int:
    """The step that ``"best:METRIC"`` names; raises ConfigError, NoCheckpointError."""
    return require_best(marked(store), BestName.parse(name), where=store.name)
