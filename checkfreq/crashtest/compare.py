"""Where a life differs from the uninterrupted run: the first boundary, and what differs there."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from checkfreq.crashtest.history import Line, Record, State
from checkfreq.crashtest.plan import VARIABLES

Pairs: TypeAlias = Mapping[str, tuple[str, str]]


class What(enum.Enum):
    """The kinds of things that can differ, in the order in which an iteration uses them."""

    VARIABLE = "variable"
    SAMPLES = "sample"
    BATCHES = "number of batches"
    BACKWARDS = "number of backward passes"
    SETTING = "setting"
    OBJECT = "object"
    LOSS = "loss"
    GENERATOR = "generator"
    TENSOR = "tensor"
    LENGTH = "length"
    FILE = "file"


_ORDER = list(What)
#: What does no harm by itself: a run that differs in nothing else has the same state and losses.
_HARMLESS = (What.SAMPLES, What.BATCHES, What.GENERATOR)
#: What may differ between uninterrupted runs while all else is the same: the time of day in a
#: variable, a file or an object, a generator that nobody seeds or uses.
_MAY_DIFFER = (What.VARIABLE, What.OBJECT, What.FILE, What.GENERATOR)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that differs: its name, and what it is in the uninterrupted and the killed run."""

    what: What
    name: str
    expected: str
    found: str

    @property
    def subject(self) -> str:
        """What a sentence on it begins with."""
        return f"{self.what.value} {self.name}"

    def __str__(self) -> str:
        return f"{self.subject}: {self.found} instead of {self.expected}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first boundary at which a life differs. ``restored``: the step that it went on from.

    ``failed_at``: the first step whose losses or state differ; None if none does, and what differs
    has done no harm. ``expected`` and ``found`` are the lines of ``step``; ``before`` and ``begin``
    those of the restored step, with their states; None where there is none. ``variables``: the
    user's, as (expected, found), where training went on.
    """

    rank: int
    restored: int
    step: int
    items: tuple[Item, ...]
    failed_at: int | None = None
    untracked: State = field(default_factory=dict)
    variables: Pairs = field(default_factory=dict)
    expected: Line | None = None
    found: Line | None = None
    before: tuple[Line, State] | None = None
    begin: tuple[Line, State] | None = None

    @property
    def first(self) -> Item:
        """What is used first in an iteration."""
        return self.items[0]


def first_difference(
    whole: Mapping[int, Record],
    lived: Mapping[int, Record],
    *,
    is_over: bool,
    ignoring: frozenset[str] = frozenset(),
) -> Difference | None:
    """The earliest difference of any rank, harmful ones first; None if the life is a piece of the
    whole run.

    ``is_over``: the life was not killed, so it has to reach the same end. ``ignoring``: names that
    may differ.
    """
    found = [
        difference
        for rank, record in sorted(lived.items())
        if record.lines
        and rank in whole
        and (difference := _of_rank(rank, whole[rank], record, is_over=is_over, ignoring=ignoring))
        is not None
    ]
    return min(found, key=lambda one: (one.failed_at is None, one.step, one.rank), default=None)


def noise(one: Mapping[int, Record], other: Mapping[int, Record]) -> frozenset[str]:
    """Names of what is not the same in two uninterrupted runs, and alone is no part of training."""
    items: list[Item] = []
    for rank in one.keys() & other.keys():
        there = {(line.kind, step): state for step, line, state in other[rank].steps()}
        for step, line, state in one[rank].steps():
            if other_state := there.get((line.kind, step)):
                items += changes(state, other_state)
        ends = one[rank].end, other[rank].end
        if ends[0] is not None and ends[1] is not None:
            items += _files(ends[0].files or {}, ends[1].files or {})
    return frozenset(item.name for item in items if item.what in _MAY_DIFFER)


def _of_rank(
    rank: int, whole: Record, record: Record, *, is_over: bool, ignoring: frozenset[str]
) -> Difference | None:
    boundaries = ("step", "passed")
    expected = {step: (line, s) for step, line, s in whole.steps() if line.kind in boundaries}
    first: Difference | None = None

    def differs(step: int, items: list[Item], line: Line) -> Difference:
        return Difference(
            rank,
            record.first_step,
            step,
            tuple(sorted(items, key=lambda item: _ORDER.index(item.what))),
            untracked={**_untracked(whole), **_untracked(record)},
            variables=_variables(whole, record, step, ignoring),
            expected=expected[step][0] if step in expected else None,
            found=line,
            before=whole.at(record.first_step),
            begin=record.at(record.first_step),
        )

    for step, line, state in record.steps():
        if line.kind not in boundaries:
            continue
        items: list[Item] = []
        if step in expected:
            is_first = step == record.first_step + 1
            found = _items(*expected[step], line, state, is_first=is_first)
            items = _told(found, ignoring)
        elif step > whole.last_step:
            items = [Item(What.LENGTH, "of the run", f"{whole.last_step} steps", "more")]
        if items:
            first = first or differs(step, items, line)
            if _do_harm(items):
                return replace(first, failed_at=step)
    if is_over and record.end is not None:
        items = _told(_at_end(whole, record, rank=rank), ignoring)
        if _do_harm(items):
            step = record.last_step
            return replace(first or differs(step, items, record.end), failed_at=step)
    return first


def _told(items: Iterable[Item], ignoring: frozenset[str]) -> list[Item]:
    """Without variables: they are causes, and no differences."""
    return [i for i in items if i.name not in ignoring and i.what is not What.VARIABLE]


def _do_harm(items: list[Item]) -> bool:
    return any(item.what not in _HARMLESS for item in items)


def _untracked(record: Record) -> State:
    return record.begin.untracked if record.begin is not None else {}


def _variables(whole: Record, record: Record, step: int, ignoring: frozenset[str]) -> Pairs:
    """The user's variables that are not the same at the first boundary where both have any."""
    for number in (record.first_step, record.first_step + 1, step):
        one, other = whole.at(number), record.at(number)
        if one is None or other is None:
            continue
        found = {
            item.name.removeprefix(VARIABLES): (item.expected, item.found)
            for item in changes(one[1], other[1])
            if item.what is What.VARIABLE and item.name not in ignoring
        }
        if found:
            return found
    return {}


def _at_end(whole: Record, record: Record, *, rank: int) -> list[Item]:
    assert record.end is not None
    items: list[Item] = []
    *_, (_, _, expected) = whole.steps()
    *_, (_, _, found) = record.steps()
    if record.begin is not None and record.last_step != whole.last_step:
        counts = f"{whole.last_step} steps", f"{record.last_step} steps"
        items.append(Item(What.LENGTH, "of the run", *counts))
    elif record.num_steps or (record.begin is not None and not rank):
        # Where nothing was trained, other ranks hold rank 0's buffers, which DDP would broadcast.
        items += changes(expected, found)
    if whole.end is not None:
        items += _files(whole.end.files or {}, record.end.files or {})
    return items


def _files(expected: Mapping[str, State], found: Mapping[str, State]) -> Iterator[Item]:
    for name in sorted({*expected, *found}):
        if name not in expected or name not in found:
            there = ["there" if name in files else "missing" for files in (expected, found)]
            yield Item(What.FILE, name, *there)
            continue
        for item in changes(expected[name], found[name]):
            inside = f": {item.name.lstrip('.')}" if item.name else ""
            yield Item(What.FILE, f"{name}{inside}", item.expected, item.found)
            break


def _items(
    expected: Line, expected_state: State, found: Line, state: State, *, is_first: bool
) -> Iterator[Item]:
    """What differs at one boundary."""
    yield from _batches(expected, found, is_first=is_first)
    if len(expected.losses) != len(found.losses):
        counts = str(len(expected.losses)), str(len(found.losses))
        yield Item(What.BACKWARDS, "of a weight update", *counts)
    for one, other in zip(expected.losses, found.losses, strict=False):
        if one != other:
            yield Item(What.LOSS, "of the iteration", one, other)
            break
    if expected_state and state:
        yield from changes(expected_state, state)


def _batches(expected: Line, found: Line, *, is_first: bool) -> Iterator[Item]:
    """Batches of the training loader: those at the end, if others were only looked at before."""
    if bool(expected.batches) != bool(found.batches):
        return
    one, other = [*expected.served], [*found.served]
    shorter = min(len(one), len(other))
    ends = one[len(one) - shorter :], other[len(other) - shorter :]
    if (is_first and not expected.batches) or ends[0] == ends[1]:
        one, other = ends
    if len(one) != len(other):
        yield Item(What.BATCHES, "of an iteration", str(len(one)), str(len(other)))
        return
    for (name, ids, digest), (_, other_ids, other_digest) in zip(one, other, strict=True):
        if ids != other_ids:
            yield Item(What.SAMPLES, f"order of {name!r}", _ids(ids), _ids(other_ids))
            return
        if digest != other_digest:
            known = "" if ids is None else f" of the same samples {_ids(ids)}"
            yield Item(What.SAMPLES, f"contents of {name!r}{known}", digest, other_digest)
            return


def _ids(ids: list[int] | None) -> str:
    if ids is None:
        return "unknown samples"
    return str(ids) if len(ids) <= 8 else f"[{', '.join(str(i) for i in ids[:8])}, ...]"


def changes(expected: State, found: State) -> Iterator[Item]:
    """What differs between two states; a variable, only if there is one in both."""
    for name in sorted({*expected, *found}):
        one, other = expected.get(name, "nothing"), found.get(name, "nothing")
        is_variable = name.startswith(VARIABLES)
        if one != other and not (is_variable and "nothing" in (one, other)):
            yield Item(_kind(name, one, other), name, one, other)


def _kind(name: str, one: str, other: str) -> What:
    if name.startswith(VARIABLES):
        return What.VARIABLE
    if name.startswith("rng."):
        return What.GENERATOR
    if ".param_groups." in name:
        return What.SETTING
    is_tensor = any("]" in text and "[" in text for text in (one, other))
    return What.TENSOR if is_tensor else What.OBJECT
