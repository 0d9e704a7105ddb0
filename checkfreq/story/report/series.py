"""What the charts draw: 100,000 points look like a few hundred of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from checkfreq.story.facts import first_step
from checkfreq.story.model import Run, Save, Story

#: Enough for a chart of a page: a phone has about so many pixels.
MOST_POINTS = 300
#: Of more runs than these the lines are drawn as one: gaps between them could not be seen.
_MOST_APART = 100
_LATEST = 12

Point = tuple[float, float]
GAP: Point = (math.nan, math.nan)
_T = TypeVar("_T")


def thinned(items: Sequence[_T], most: int = MOST_POINTS) -> list[_T]:
    """At most ``most`` + 1 items at equal distances, the first and the last among them."""
    every = -(-len(items) // most) if items else 1
    kept = list(items[::every])
    if items and (len(items) - 1) % every:
        kept.append(items[-1])
    return kept


def decimated(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about ``most`` points, in order, with the lowest and the highest of each stretch."""
    if len(points) <= most:
        return list(points)
    size = -(-2 * len(points) // most)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        values = [value for _, value in points[start : start + size]]
        places = {values.index(min(values)), values.index(max(values))}
        kept += [points[start + place] for place in sorted(places)]
    if kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def joined(lines: Sequence[Sequence[Point]]) -> list[Point]:
    """Lines of runs as one, with a `GAP` between two."""
    lines = [line for line in lines if line]
    if len(lines) > _MOST_APART:
        return decimated([point for line in lines for point in line])
    most = max(4, 2 * MOST_POINTS // max(1, len(lines)))
    parts = [[*decimated(line, most), GAP] for line in lines]
    return [point for part in parts for point in part][:-1]


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time in a lane of the timeline."""

    lane: str
    start_s: float
    length_s: float


class Series:
    """The series of a story. Each is worked out once, however often it is drawn."""

    def __init__(self, story: Story) -> None:
        self.story = story

    def _of_runs(self, line: Callable[[Run], Sequence[Point]]) -> list[Point]:
        return joined([line(run) for run in self.story.runs])

    @cached_property
    def progress(self) -> list[Point]:
        """When the runs reached which step."""
        return self._of_runs(_progress)

    @cached_property
    def lost(self) -> list[Point]:
        """What was done again: from the last known step of a run to where the next one went on."""
        return joined([line for run in self.story.runs[-_MOST_APART:]
                       if (line := self._lost(run))])  # fmt: skip

    def _lost(self, run: Run) -> list[Point]:
        before, restore, loss = self.story.before(run), run.restore, self.story.loss(run)
        if before is None or restore is None or loss is None or not loss.most_steps:
            return []
        at_s, known = before.last_known
        end = float(max(known, restore.step + loss.steps))
        return [(at_s, float(known)), (before.last_s, end), (restore.at_s, float(restore.step))]

    @cached_property
    def commits(self) -> list[Point]:
        """The instant and the step of each commit."""
        saves = thinned(list(self.story.saves))
        return [(run.durable_s(save), float(save.step)) for run, save in saves]

    @cached_property
    def failures(self) -> list[Point]:
        """When a checkpoint of which step failed."""
        notes = (note for run in self.story.runs for note in run.notes if note.kind == "failed")
        return thinned([(note.at_s, float(note.step)) for note in notes], _MOST_APART)

    @cached_property
    def intervals(self) -> list[Point]:
        """The interval in iterations, as planned."""
        return self._of_runs(_intervals)

    @cached_property
    def overheads(self) -> list[Point]:
        """The measured overhead in percent."""
        return self._of_runs(_overheads)

    @cached_property
    def bounds(self) -> list[Point]:
        """The bound of the overhead in percent, from the begin of each run to its end."""
        return self._of_runs(_bound)

    @cached_property
    def written(self) -> list[Point]:
        """What was written to storage so far, in bytes."""
        totals = accumulate(save.written_bytes for _, save in self.story.saves)
        found = thinned([*zip(self.story.saves, totals, strict=True)])
        return [(run.durable_s(save), float(total)) for (run, save), total in found]

    @cached_property
    def uploaded(self) -> list[Point]:
        """What was sent to the mirror so far, in bytes."""
        uploads = [upload for run in self.story.runs for upload in run.uploads]
        totals = accumulate(upload.num_bytes for upload in uploads)
        found = thinned([*zip(uploads, totals, strict=True)])
        return [(upload.at_s, float(total)) for upload, total in found]

    @cached_property
    def latest(self) -> list[tuple[Run, Save]]:
        """The last checkpoints of the last run that took any, for a closer look."""
        for run in reversed(self.story.runs):
            if own := list(run.own_saves):
                return [(run, save) for save in own[-_LATEST:]]
        return []

    @cached_property
    def bars(self) -> list[Bar]:
        """The timeline of the `latest` checkpoints."""
        found: list[Bar] = []
        for run, save in self.latest:
            start_s, durable_s = run.started_s(save), run.durable_s(save)
            found.append(Bar("training held", start_s, save.stall_s or 0.0))
            found.append(Bar("snapshot", start_s, save.copy_s or 0.0))
            persist_s = save.persist_s or 0.0
            found.append(Bar("persist", durable_s - persist_s, persist_s))
        if self.latest:
            run, first = self.latest[0]
            since_s = run.started_s(first)
            found += [
                Bar("upload", upload.at_s - upload.upload_s, upload.upload_s)
                for upload in run.uploads
                if upload.upload_s is not None and upload.at_s >= since_s
            ]
        return found


def _progress(run: Run) -> list[Point]:
    first = first_step(run)
    began_s = run.restore.at_s if run.restore is not None else run.began_s
    points: list[Point] = [] if first is None else [(began_s, float(first))]
    own = thinned([*run.own_saves])
    points += [(run.started_s(save), float(save.step)) for save in own]
    if run.saves and (last := run.saves[-1]).at_step is not None:
        points.append((last.told_s, float(last.at_step)))
    return sorted(points) if len(points) > 1 else []


def _intervals(run: Run) -> list[Point]:
    points = [(one.at_s, float(one.interval_steps)) for one in run.plans if one.interval_steps]
    if not points and run.manual_interval:
        points = [(run.began_s, float(run.manual_interval))]
    if points:
        points.append((run.last_s, points[-1][1]))
    return points


def _overheads(run: Run) -> list[Point]:
    return [(save.told_s, 100 * save.overhead) for save in run.saves if save.overhead is not None]


def _bound(run: Run) -> list[Point]:
    if run.max_overhead is None:
        return []
    return [(at_s, 100 * run.max_overhead) for at_s in (run.began_s, run.last_s)]
