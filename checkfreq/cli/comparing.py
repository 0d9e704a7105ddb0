"""Two checkpoints compared: `compare`, and its result as JSON and as lines.

Tensors whose recorded digests are equal are not read. The others are read one pair at a time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkfreq.cli import text
from checkfreq.cli.differences import MISSING, Change, Difference, changes, difference
from checkfreq.cli.places import Place
from checkfreq.errors import ConfigError, CorruptCheckpointError, printable
from checkfreq.formats.numpy_reader import Checkpoint, Layout, open_checkpoint
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore
from checkfreq.types import Json

_BAR = 40
_LONGEST_VALUE = 60
#: What the JSON of a rank's object says of the division into files, and not of the state.
_OF_FILES = "shards"


@dataclass(frozen=True, slots=True)
class Key:
    """A tensor of a checkpoint; ``rank`` is None unless each rank has its own."""

    object: str
    tensor: str
    rank: int | None

    def __str__(self) -> str:
        own = "" if self.rank is None else f" (rank {self.rank})"
        return f"{self.object}.{self.tensor}{own}"


@dataclass(slots=True)
class Comparison:
    """What differs between ``a`` and ``b``, in the order of the files."""

    a: Place
    b: Place
    num_tensors: int = 0
    num_equal: int = 0
    only_a: list[Key] = field(default_factory=list)
    only_b: list[Key] = field(default_factory=list)
    changed: list[tuple[Key, Layout, Layout]] = field(default_factory=list)
    different: list[tuple[Key, Layout, Difference]] = field(default_factory=list)
    values: list[Change] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether there is any difference."""
        return bool(self.only_a or self.only_b or self.changed or self.different or self.values)

    def to_json(self, *, histogram: bool) -> Json:
        """One document; numbers that JSON does not have are text."""
        return {
            "a": {"path": self.a.store.name, "step": self.a.step},
            "b": {"path": self.b.store.name, "step": self.b.step},
            "equal": not self.differs,
            "num_tensors": self.num_tensors,
            "num_equal_tensors": self.num_equal,
            "different_tensors": [
                {"name": str(key), **_layout_json(layout), **_difference_json(found, histogram)}
                for key, layout, found in self.different
            ],
            "changed_tensors": [
                {"name": str(key), "a": _layout_json(one), "b": _layout_json(other)}
                for key, one, other in self.changed
            ],
            "only_in_a": [str(key) for key in self.only_a],
            "only_in_b": [str(key) for key in self.only_b],
            "different_values": [_change_json(change) for change in self.values],
        }

    def lines(self, *, most: int | None, histogram: bool) -> Iterator[str]:
        """For people; at most ``most`` lines of a kind."""
        yield f"A  {printable(self.a.name)}"
        yield f"B  {printable(self.b.name)}"
        yield ""
        if self.different:
            shown = self.different[:most]
            yield text.table(_HEAD, (_cells(*one) for one in shown))
            yield from _more(self.different, most)
            yield ""
        for key, _, found in self.different[:most] if histogram else ():
            yield from _histogram(key, found)
        lines = [
            *(f"{key}: only in A" for key in self.only_a),
            *(f"{key}: only in B" for key in self.only_b),
            *(f"{key}: {_kind(one)} in A, {_kind(two)} in B" for key, one, two in self.changed),
        ]
        for kind in (lines, [_change_line(change) for change in self.values]):
            yield from (printable(line) for line in kind[:most])
            yield from _more(kind, most)
        yield self._summary()

    def _summary(self) -> str:
        if not self.differs:
            return f"equal: {self.num_tensors} tensors, and everything else"
        num = self.num_tensors - self.num_equal
        return f"different: {num} of {self.num_tensors} tensors, {len(self.values)} other value(s)"


_HEAD = ("TENSOR", "DTYPE", "SHAPE", "DIFFERENT", "SHARE", "MAX ABS", "MAX REL", "NAN")


def compare(a: Place, b: Place, *, only: Collection[str] = ()) -> Comparison:
    """Compare two checkpoints; ``only`` some objects of them.

    Raises CorruptCheckpointError for bytes that are not what was written.
    """
    one, other = _opened(a), _opened(b)
    unknown = sorted({*only} - {*one.names, *other.names})
    if unknown:
        there = ", ".join(dict.fromkeys([*one.names, *other.names]))
        raise ConfigError(f"--only {unknown[0]}: expected one of {there}")
    found = Comparison(a, b)
    names = [name for name in dict.fromkeys([*one.names, *other.names]) if name in only or not only]
    try:
        for name in names:
            _compare_tensors(found, one, other, name)
            _compare_values(found, one, other, name)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # Both records are well-formed: what they say of shards or of bytes is wrong.
        raise CorruptCheckpointError(
            f"{a.name} or {b.name}", check="contents", expected="what was written", got=error
        ) from None
    return found


def _opened(place: Place) -> Checkpoint:
    store = place.store
    if not isinstance(store, CheckpointStore):
        return _Remote(store, place.step)
    store.inspect(place.step)  # its errors are better, and it follows no links
    return open_checkpoint(store.path(place.step))


class _Remote(Checkpoint):
    """A checkpoint in a mirror: only tensors that differ are fetched, one at a time."""

    def __init__(self, source: CheckpointSource, step: int) -> None:
        record = source.record(step)
        manifest = source.whole(source.parse(step, record))
        source.check_sizes(step, manifest.files)
        self._source, self._step = source, step
        self._entries_by_name = {entry.name: entry for entry in manifest.files}
        self._take(record, source.where(step))

    @property
    def step(self) -> int:
        """The step it was taken at."""
        return self._step

    def _bytes(self, file: dict[str, Any], start: int, count: int) -> bytearray:
        data = bytearray(count)
        payload = self._source.open_payload(self._step, self._entries_by_name[file["name"]])
        try:
            read = payload.preadinto(memoryview(data), start)
        finally:
            payload.close()
        return data[:read]


def _compare_tensors(found: Comparison, a: Checkpoint, b: Checkpoint, name: str) -> None:
    in_a, in_b = _layouts(a, name), _layouts(b, name)
    found.only_a += [key for key in in_a if key not in in_b]
    found.only_b += [key for key in in_b if key not in in_a]
    found.num_tensors += len({*in_a, *in_b})
    for key, one in in_a.items():
        other = in_b.get(key)
        if other is None:
            continue
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            found.changed.append((key, one, other))
        elif one.digests == other.digests:
            found.num_equal += 1
        else:
            held = (name, key.tensor, key.rank or 0)
            result = difference(a.tensor(*held), b.tensor(*held), one.dtype)
            if result.num_different:
                found.different.append((key, one, result))
            else:  # in other shards, or in other pieces
                found.num_equal += 1


def _layouts(checkpoint: Checkpoint, name: str) -> dict[Key, Layout]:
    found: dict[Key, Layout] = {}
    for rank in checkpoint.ranks or (0,):
        for key, layout in checkpoint.layouts(name, rank).items():
            found.setdefault(Key(name, key, layout.rank), layout)
    return found


def _compare_values(found: Comparison, a: Checkpoint, b: Checkpoint, name: str) -> None:
    found.values += changes(_shared(a, name), _shared(b, name), name)
    for rank in sorted({*a.ranks, *b.ranks}):
        own_a, own_b = _own(a, rank, name), _own(b, rank, name)
        found.values += changes(own_a, own_b, f"{name} (rank {rank})")


def _shared(checkpoint: Checkpoint, name: str) -> Json:
    return checkpoint.manifest["objects"].get(name, MISSING)


def _own(checkpoint: Checkpoint, rank: int, name: str) -> Json:
    own = checkpoint.manifest.get("ranks", {}).get(str(rank), {}).get(name, MISSING)
    if isinstance(own, dict):
        return {key: value for key, value in own.items() if key != _OF_FILES} or MISSING
    return own


def _kind(layout: Layout) -> str:
    return f"{layout.dtype} {text.shape(layout.shape)}"


def _layout_json(layout: Layout) -> dict[str, Json]:
    return {"dtype": layout.dtype, "shape": list(layout.shape)}


def _difference_json(found: Difference, histogram: bool) -> dict[str, Json]:
    record: dict[str, Json] = {
        "num_elements": found.num_elements,
        "num_different": found.num_different,
        "share": found.share,
        "max_abs": _number(found.max_abs),
        "max_rel": _number(found.max_rel),
        "num_nan": found.num_nan,
    }
    if histogram:
        record["histogram"] = [
            {"from": 10.0**power, "below": 10.0 ** (power + 1), "count": found.decades[power]}
            for power in sorted(found.decades)
        ]
        record["num_outside_histogram"] = found.num_other
    return record


def _number(value: float | None) -> Json:
    return value if value is None or math.isfinite(value) else str(value)


def _change_json(change: Change) -> dict[str, Json]:
    sides = {"a": change.a, "b": change.b}
    there = {side: value for side, value in sides.items() if value is not MISSING}
    return {"name": change.name, **there}


def _cells(key: Key, layout: Layout, found: Difference) -> list[str]:
    return [
        str(key),
        layout.dtype,
        text.shape(layout.shape),
        f"{found.num_different} of {found.num_elements}",
        f"{100 * found.share:.3g} %",
        "-" if found.max_abs is None else f"{found.max_abs:.3g}",
        "-" if found.max_rel is None else f"{found.max_rel:.3g}",
        str(found.num_nan or "-"),
    ]


def _histogram(key: Key, found: Difference) -> Iterator[str]:
    yield printable(f"{key}: differences")
    most = max([*found.decades.values(), found.num_other])
    for power in sorted(found.decades):
        count = found.decades[power]
        bar = "#" * math.ceil(_BAR * count / most)
        yield f"  1e{power:+03d} to 1e{power + 1:+03d}  {bar:{_BAR}}  {count}"
    if found.num_other:
        bar = "#" * math.ceil(_BAR * found.num_other / most)
        yield f"  bits, nan or inf  {bar:{_BAR}}  {found.num_other}"
    yield ""


def _change_line(change: Change) -> str:
    if change.a is MISSING or change.b is MISSING:
        side, value = ("B", change.b) if change.a is MISSING else ("A", change.a)
        return f"{change.name}: only in {side}, {_short(value)}"
    return f"{change.name}: {_short(change.a)} in A, {_short(change.b)} in B"


def _short(value: Json) -> str:
    said = text.json_of(value, indent=None)
    return said if len(said) <= _LONGEST_VALUE else f"{said[: _LONGEST_VALUE - 3]}..."


def _more(lines: Sequence[object], most: int | None) -> Iterator[str]:
    if most is not None and len(lines) > most:
        yield f"... and {len(lines) - most} more (--all)"
