"""Takes a recorded run apart: iterations as they are without checkpoints, and checkpoints' costs.

An iteration that no checkpoint touched, nor followed closely, is *clean* and stays as it is. What
a touched one took is compared with the clean iterations around it, at the same phase where the
loop has a rhythm: the difference is the checkpoint's, and a clean neighbour takes its place. So
whatever slows the machine for longer than a few iterations, a burst or a drift, stays in the series
and is no checkpoint's cost. Only means are used: over the trace, nothing is lost or counted twice.

A single difference is mostly noise, so the slowdown of a checkpoint is the mean of those next to
it, without those at which the machine became faster or slower: one that changes from checkpoint to
checkpoint seems steadier than it was. The time for which each held training, its copy and its
persist are its own. Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, variance

from checkfreq.errors import ConfigError
from checkfreq.policy.charges import AFTERMATH_ITERATIONS
from checkfreq.simulation.recorded import Recorded, Recording

#: Clean iterations on either side that a touched one is compared with.
_NEIGHBOURS = 12
#: Fewer clean iterations say nothing about those that were touched.
_LEAST_CLEAN = 8
#: Checkpoints whose mean slowdown each of them gets.
_SMOOTHED = 15
#: The longest rhythm that is looked for, in iterations, and the part of the variance that it must
#: explain; a multiple of a rhythm explains hardly more than the rhythm.
_LONGEST_RHYTHM = 64
_LEAST_EXPLAINED = 0.3
_AS_GOOD = 0.95
_WARM_UP_ITERATIONS = 2
_MOST_AT_A_TIME = 16
#: A snapshot is begun just after a boundary; rounded, it may seem to be before it.
_ROUNDING_S = 2e-5
#: Beside a checkpoint the machine has become faster or slower if the clean iterations before and
#: after it differ by so many standard errors, and by this part of an iteration.
_STANDARD_ERRORS = 4.0
_LEAST_SHIFT = 0.02
_LEAST_REPEATS = 6


@dataclass(frozen=True, slots=True)
class Cost:
    """What one checkpoint costs, iteration by iteration from its boundary on. Seconds.

    index: the first of these iterations. held_s: by which training was held. slowed_s: by which
    iterations were longer besides; may be negative, by chance. copy_s, persist_s: as measured.
    tail_s: from the end of the copy, or of the checkpoint before if that came later, until it was
    durable. planned_steps: the interval planned when it was begun.
    """

    index: int
    held_s: tuple[float, ...]
    slowed_s: tuple[float, ...]
    copy_s: float
    persist_s: float
    tail_s: float
    state_bytes: int
    planned_steps: int | None

    @property
    def total_s(self) -> float:
        """The time that it adds to training (o)."""
        return math.fsum(self.held_s) + math.fsum(self.slowed_s)


@dataclass(frozen=True, slots=True)
class Series:
    """A run without its checkpoints, and what each of those cost.

    work_s: of each iteration. boundary_s: what the manager's code takes at each boundary anyway.
    costs: of durable checkpoints; the first is that of the first checkpoint of the run.
    rhythm: the period of the iterations; 1 if they have none. num_clean: iterations that no
    checkpoint touched.
    """

    recording: Recording
    work_s: tuple[float, ...]
    boundary_s: tuple[float, ...]
    costs: tuple[Cost, ...]
    rhythm: int
    num_clean: int

    def iteration_s(self) -> float:
        """The mean of all iterations."""
        return fmean(self.work_s)


def take_apart(recording: Recording) -> Series:
    """ConfigError, saying what to record instead, if there is too little to compare."""
    return _Taking(recording).series()


class _Taking:
    """The work of ``take_apart``."""

    def __init__(self, recording: Recording) -> None:
        self._run = recording
        self._moved_s = [
            max(
                0.0,
                took_s - held_s - recording.waited_s.get(at, 0.0) - recording.met_s.get(at, 0.0),
            )
            for at, (took_s, held_s) in enumerate(
                zip(recording.took_s, recording.held_s, strict=True)
            )
        ]
        self._checkpoints = sorted(recording.checkpoints, key=lambda each: each.start_s)
        self._spans = [self._span(each) for each in self._checkpoints]
        self._require_sensible()
        self._holding = {at for each in zip(self._spans, self._checkpoints, strict=True)
                         for at in self._held_in(*each)}  # fmt: skip
        self._touched = {at for first, last in self._after() for at in range(first, last)}
        self._clean = [at for at in range(recording.num_iterations) if self._is_comparable(at)]
        if len(self._clean) < _LEAST_CLEAN:
            raise ConfigError(
                f"{recording.name}: expected at least {_LEAST_CLEAN} iterations that no checkpoint "
                f"touched, found {len(self._clean)} of {recording.num_iterations}: record a run "
                "with CFMode.AUTO, or with a longer interval"
            )
        self.rhythm = _rhythm(self._clean, self._moved_s)
        self._by_phase = [
            [at for at in self._clean if at % self.rhythm == phase] for phase in range(self.rhythm)
        ]
        mean_s = fmean(self._moved_s[at] for at in self._clean)
        self._usual_s = [
            fmean(self._moved_s[at] for at in phase) if phase else mean_s
            for phase in self._by_phase
        ]

    def _require_sensible(self) -> None:
        """A run has two slots, seldom more: it cannot have had many checkpoints at a time."""
        num_touched = sum(last - first for first, last in self._spans)
        if num_touched > _MOST_AT_A_TIME * (self._run.num_iterations + len(self._spans)):
            raise ConfigError(
                f"{self._run.name}: expected at most {_MOST_AT_A_TIME} checkpoints at a time, "
                "found more on average: this is no trace of a run"
            )

    def series(self) -> Series:
        """What remains, and the costs."""
        run, work_s, boundary_s = self._run, list(self._moved_s), list(self._run.held_s)
        expected_s: dict[int, tuple[float, float]] = {}
        for at in sorted(self._touched):
            near = self._near(at)
            expected_s[at] = (
                fmean(self._moved_s[each] for each in near),
                fmean(run.held_s[each] for each in near),
            )
            if at in self._holding:  # at others, what took long had nothing to do with checkpoints
                boundary_s[at] = run.held_s[near[at % len(near)]]
            if self._can_compare(at):  # another keeps its own time, whatever it contains
                work_s[at] = self._moved_s[near[at % len(near)]]
        costs = self._costs(expected_s)
        if not costs:
            raise ConfigError(
                f"{run.name}: expected at least one checkpoint that became durable, found none: "
                "record a longer run"
            )
        return Series(
            run, tuple(work_s), tuple(boundary_s), tuple(costs), self.rhythm, len(self._clean)
        )

    # ---- which checkpoint touched which iteration

    def _span(self, checkpoint: Recorded) -> tuple[int, int]:
        """The iterations that it touched: from the first until before the second."""
        starts_s = self._run.start_s
        first = max(0, bisect_right(starts_s, checkpoint.start_s + _ROUNDING_S) - 1)
        return first, max(first + 1, bisect_left(starts_s, checkpoint.end_s))

    def _held_in(self, span: tuple[int, int], checkpoint: Recorded) -> tuple[int, ...]:
        """Where it can hold training: at its snapshot, at the next update, when its end is read."""
        told_s = checkpoint.start_s + checkpoint.told_s
        told = bisect_right(self._run.start_s, told_s) - 1
        return span[0], span[0] + 1, told, told + 1

    def _after(self) -> list[tuple[int, int]]:
        """The same with the aftermath, which ends where the next checkpoint begins."""
        num = self._run.num_iterations
        firsts = sorted(first for first, _ in self._spans)
        ends = []
        for first, last in self._spans:
            place = bisect_right(firsts, first)
            next_one = firsts[place] if place < len(firsts) else num
            after = min(last + AFTERMATH_ITERATIONS, next_one)
            ends.append((first, min(num, max(last, after))))
        return ends

    def _can_compare(self, at: int) -> bool:
        return at not in self._run.irregular and at not in self._run.uncounted

    def _is_comparable(self, at: int) -> bool:
        warm = at - len(self._run.uncounted) >= _WARM_UP_ITERATIONS
        return warm and at not in self._touched and self._can_compare(at)

    def _near(self, at: int) -> list[int]:
        """The clean iterations around one, of its phase if there are any of that."""
        phase = self._by_phase[at % self.rhythm]
        clean = phase if len(phase) >= _LEAST_CLEAN else self._clean
        place = bisect_left(clean, at)
        return clean[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]

    # ---- costs

    def _costs(self, expected_s: dict[int, tuple[float, float]]) -> list[Cost]:
        run, after = self._run, self._after()
        held: list[list[float]] = []
        slowed: list[list[float]] = []
        shares = self._shares(after)
        for number, (first, last) in enumerate(after):
            part = [shares[at, number] for at in range(first, last)]
            ats = range(first, last)
            held.append(
                [
                    p * (run.held_s[at] - expected_s[at][1]) if at in self._holding else 0.0
                    for at, p in zip(ats, part, strict=True)
                ]
            )
            slowed.append(
                [
                    p * (self._moved_s[at] - expected_s[at][0]) if self._can_compare(at) else 0.0
                    for at, p in zip(ats, part, strict=True)
                ]
            )
        chosen, found = self._chosen(), []
        idle_s = self._idle_s()
        for place, number in enumerate(chosen):
            # Not the run's first beside others: its memory and files are new, which happens once.
            near = _around(chosen[1:], place - 1) if place else [number]
            near = [each for each in near if not self._is_between(each)] or near
            means = _mean([slowed[each] for each in near])
            found.append(self._cost(number, held[number], means, idle_s[number]))
        return found

    def _is_between(self, number: int) -> bool:
        """Whether the machine changed its speed beside a checkpoint, so that it cannot be compared.

        Left out are as many changes upwards as downwards, which is right on average.
        """
        first, last = self._spans[number]
        begin, end = bisect_left(self._clean, first), bisect_left(self._clean, last)
        before = self._clean[max(0, begin - _NEIGHBOURS) : begin]
        after = self._clean[end : end + _NEIGHBOURS]
        if len(before) < 2 or len(after) < 2:
            return False
        sides = [[self._moved_s[at] - self._usual_s[at % self.rhythm] for at in side]
                 for side in (before, after)]  # fmt: skip
        shift_s = abs(fmean(sides[0]) - fmean(sides[1]))
        error_s = math.sqrt(sum(variance(side) / len(side) for side in sides))
        least_s = _LEAST_SHIFT * fmean(self._usual_s)
        return shift_s > max(_STANDARD_ERRORS * error_s, least_s)

    def _idle_s(self) -> list[float]:
        """When the worker was done with all that came before each checkpoint."""
        found, busy_until_s = [], -math.inf
        for each in self._checkpoints:
            found.append(busy_until_s)
            busy_until_s = max(busy_until_s, each.end_s)
        return found

    def _shares(self, after: Sequence[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """How much of an iteration's time is each checkpoint's: equal parts."""
        touching: dict[int, int] = {}
        for first, last in after:
            for at in range(first, last):
                touching[at] = touching.get(at, 0) + 1
        return {
            (at, number): 1 / touching[at]
            for number, (first, last) in enumerate(after)
            for at in range(first, last)
        }

    def _chosen(self) -> list[int]:
        """Numbers of the checkpoints whose costs are a periodic one's, if there are such."""
        durable = [number for number, each in enumerate(self._checkpoints) if not each.has_failed]
        periodic = [number for number in durable if self._checkpoints[number].reason == "periodic"]
        return periodic or durable

    def _cost(
        self, number: int, held_s: Sequence[float], slowed_s: Sequence[float], idle_s: float
    ) -> Cost:
        checkpoint = self._checkpoints[number]
        copied_s = checkpoint.start_s + max(checkpoint.copy_s, checkpoint.stall_s)
        return Cost(
            index=self._spans[number][0],
            held_s=tuple(held_s),
            slowed_s=tuple(slowed_s),
            copy_s=checkpoint.copy_s,
            persist_s=checkpoint.persist_s,
            tail_s=max(0.0, checkpoint.end_s - max(copied_s, idle_s)),
            state_bytes=checkpoint.state_bytes,
            planned_steps=checkpoint.planned_steps,
        )


def _around(chosen: Sequence[int], place: int) -> Sequence[int]:
    """The one at ``place`` and those next to it."""
    first = max(0, min(place - _SMOOTHED // 2, len(chosen) - _SMOOTHED))
    return chosen[first : first + _SMOOTHED]


def _mean(rows: Sequence[Sequence[float]]) -> list[float]:
    """The means by position; a row that has ended counts as zeros."""
    means = [fmean(values) for values in zip_longest(*rows, fillvalue=0.0)]
    return means if math.fsum(means) > 0 else [0.0] * len(means)  # none makes training faster


def _rhythm(clean: Sequence[int], times_s: Sequence[float]) -> int:
    """The period that explains most of the variance of clean iterations; 1 if none does."""
    values = [times_s[at] for at in clean]
    mean = fmean(values)
    whole = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    explained: dict[int, float] = {}
    for period in range(2, min(_LONGEST_RHYTHM, len(clean) // _LEAST_REPEATS) + 1):
        phases: dict[int, list[float]] = {}
        for at, value in zip(clean, values, strict=True):
            phases.setdefault(at % period, []).append(value)
        rest = 0.0
        for phase in phases.values():
            middle = fmean(phase)
            rest += math.fsum((value - middle) ** 2 for value in phase)
        if whole > 0 and len(values) > period:
            explained[period] = 1 - rest / (len(values) - period) / whole
    best = max(explained.values(), default=0.0)
    if best < _LEAST_EXPLAINED:
        return 1
    return min(period for period, part in explained.items() if part >= _AS_GOOD * best)
