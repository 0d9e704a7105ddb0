"""Where a life differs from the uninterrupted run: the first boundary, and what differs there."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from checkfreq.crashtest.history import Line, Record, State


class What(enum.Enum):
    """The kinds of things that can differ, in the order in which an iteration uses them."""

    SAMPLES = "sample"
    NUM_BATCHES = "number of batches"
    SETTING = "setting"
    OBJECT = "object"
    LOSS = "loss"
    GENERATOR = "generator"
    TENSOR = "tensor"
    LENGTH = "length"
    FILE = "file"


_ORDER = list(What)


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that differs: its name, and what it is in the uninterrupted and the killed run."""

    what: What
    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.what.value} {self.name}: {self.found} instead of {self.expected}"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first boundary at which a life differs. ``restored``: the step that it went on from.

    ``expected`` and ``found`` are the lines there, and those at the restored step, with their whole
    states; None where there is none.
    """

    rank: int
    restored: int
    step: int
    items: tuple[Item, ...]
    untracked: State = field(default_factory=dict)
    expected: Line | None = None
    found: Line | None = None
    expected_state: State = field(default_factory=dict)
    found_state: State = field(default_factory=dict)
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
    """The earliest difference of any rank; None if the life is a piece of the whole run.

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
    return min(found, key=lambda one: (one.step, one.rank), default=None)


def _of_rank(
    rank: int, whole: Record, record: Record, *, is_over: bool, ignoring: frozenset[str]
) -> Difference | None:
    expected = {step: (line, state) for step, line, state in whole.steps() if line.kind == "step"}
    begin = record.lines[0]

    def differs(step: int, items: list[Item], line: Line, state: State) -> Difference:
        other = expected.get(step)
        return Difference(
            rank,
            record.first_step,
            step,
            tuple(sorted(items, key=lambda item: _ORDER.index(item.what))),
            {**(whole.lines[0].untracked if whole.lines else {}), **begin.untracked},
            other[0] if other else None,
            line,
            other[1] if other else {},
            state,
            whole.at(record.first_step),
            record.at(record.first_step),
        )

    for step, line, state in record.steps():
        if line.kind != "step":
            continue
        if step not in expected:
            if step > whole.last_step:
                item = Item(What.LENGTH, "of the run", f"{whole.last_step} steps", "more")
                return differs(step, [item], line, state)
            continue
        is_first = step == record.first_step + 1
        found = _items(*expected[step], line, state, is_first=is_first)
        items = [item for item in found if item.name not in ignoring]
        if items:
            return differs(step, items, line, state)
    if not is_over or record.end is None:
        return None
    *_, (_, _, state) = record.steps()
    items = [item for item in _at_end(whole, record, state) if item.name not in ignoring]
    return differs(record.last_step, items, record.end, state) if items else None


def _at_end(whole: Record, record: Record, state: State) -> list[Item]:
    assert record.end is not None
    items: list[Item] = []
    *_, (_, _, other) = whole.steps()
    if record.last_step != whole.last_step:
        counts = f"{whole.last_step} steps", f"{record.last_step} steps"
        items.append(Item(What.LENGTH, "of the run", *counts))
    else:
        items += changes(other, state)
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
            yield Item(What.FILE, f"{name}: {item.name.lstrip('.')}", item.expected, item.found)
            break


def _items(
    expected: Line, expected_state: State, found: Line, state: State, *, is_first: bool
) -> Iterator[Item]:
    """What differs at one boundary."""
    yield from _batches(expected, found, is_first=is_first)
    if expected.losses != found.losses:
        if len(expected.losses) != len(found.losses):
            counts = str(len(expected.losses)), str(len(found.losses))
            yield Item(What.NUM_BATCHES, "of a weight update (backward passes)", *counts)
        else:
            pairs = zip(expected.losses, found.losses, strict=True)
            one, other = next((a, b) for a, b in pairs if a != b)
            yield Item(What.LOSS, "of the iteration", one, other)
    if expected.digest != found.digest:
        yield from changes(expected_state, state)


def _batches(expected: Line, found: Line, *, is_first: bool) -> Iterator[Item]:
    """Batches of the training loader; where a life goes on, it may have skipped some before."""
    if bool(expected.batches) != bool(found.batches):
        return
    one, other = [*expected.served], [*found.served]
    if is_first and not expected.batches:
        shorter = min(len(one), len(other))
        one, other = one[len(one) - shorter :], other[len(other) - shorter :]
    if len(one) != len(other):
        yield Item(What.NUM_BATCHES, "of an iteration", str(len(one)), str(len(other)))
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
    """What differs between two states."""
    for name in sorted({*expected, *found}):
        one, other = expected.get(name, "nothing"), found.get(name, "nothing")
        if one != other:
            yield Item(_kind(name, one, other), name, one, other)


def _kind(name: str, one: str, other: str) -> What:
    if name.startswith("rng."):
        return What.GENERATOR
    if ".param_groups." in name:
        return What.SETTING
    is_tensor = any("]" in text and "[" in text for text in (one, other))
    return What.TENSOR if is_tensor else What.OBJECT
