"""JSON values that are much alike, one of each rank, with what they share written once. Pure.

Values of the same form (the same keys, lists of the same lengths) make one table::

    {"of": [[0, 3]], "form": {"epoch": 3, "place": {"$each": [7, 8, 9]}}}

``of``: which of the values they are, as the first of a row of them and how many. ``form``: one of
the values, with ``{"$each": [...]}`` in place of whatever differs. A dict that has a key beginning
with "$" is not taken apart: it is ``{"$same": dict}``, or differs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from checkfreq.types import Json

_EACH, _SAME = "$each", "$same"


def pack(values: Sequence[Json]) -> list[Json]:
    """The tables of the values."""
    by_form: dict[object, list[int]] = {}
    for number, value in enumerate(values):
        by_form.setdefault(_form_of(value), []).append(number)
    return [
        {"of": _rows(numbers), "form": _joined([values[number] for number in numbers])}
        for numbers in by_form.values()
    ]


def unpack(tables: Json, count: int) -> list[Json]:
    """The ``count`` values that were packed; ValueError for anything but what `pack` makes."""
    found: dict[int, Json] = {}
    for table in _list(tables):
        if not isinstance(table, dict) or table.keys() != {"of", "form"}:
            raise ValueError(f'expected a table of "of" and "form", found {table!r:.80}')
        numbers = list(_numbers(table["of"], count))
        pick = _picker(table["form"], len(numbers))
        for place, number in enumerate(numbers):
            if number in found:
                raise ValueError(f"expected value {number} once, found it twice")
            found[number] = pick(place)
    if len(found) != count:
        raise ValueError(f"expected {count} values, found {len(found)}")
    return [found[number] for number in range(count)]


def _is_whole(value: Json) -> bool:
    """Whether a value is not taken apart."""
    if isinstance(value, dict):
        return any(key.startswith("$") for key in value)
    return not isinstance(value, list)


def _form_of(value: Json) -> object:
    """Equal for values of the same form."""
    if _is_whole(value):
        return isinstance(value, dict)
    if isinstance(value, list):
        return (None, *map(_form_of, value))
    return (tuple(value), *map(_form_of, value.values()))


def _joined(values: Sequence[Json]) -> Json:
    first = values[0]
    if _is_whole(first):
        if not all(_is_same(first, value) for value in values):
            return {_EACH: list(values)}
        return {_SAME: first} if isinstance(first, dict) else first
    if isinstance(first, list):
        return [_joined(column) for column in zip(*values, strict=True)]
    return {key: _joined([value[key] for value in values]) for key in first}


def _is_same(one: Json, other: Json) -> bool:
    """Whether two values that are not taken apart are the same; 1, 1.0 and true are not."""
    if type(one) is not type(other) or one != other:
        return False
    return not isinstance(one, dict | float) or json.dumps(one) == json.dumps(other)


def _picker(form: Json, count: int) -> Callable[[int], Json]:
    """What gives the value at a place of a table of ``count``."""
    if isinstance(form, dict):
        if form.keys() == {_SAME}:
            return lambda place: form[_SAME]
        if form.keys() == {_EACH}:
            column = _list(form[_EACH])
            if len(column) != count:
                raise ValueError(f"expected {count} values in a column, found {len(column)}")
            return lambda place: column[place]
        inner = {key: _picker(one, count) for key, one in form.items()}
        return lambda place: {key: pick(place) for key, pick in inner.items()}
    if isinstance(form, list):
        items = [_picker(one, count) for one in form]
        return lambda place: [pick(place) for pick in items]
    return lambda place: form


def _rows(numbers: Sequence[int]) -> list[list[int]]:
    rows: list[list[int]] = []
    for number in numbers:
        if rows and number == sum(rows[-1]):
            rows[-1][1] += 1
        else:
            rows.append([number, 1])
    return rows


def _numbers(rows: Json, count: int) -> Iterator[int]:
    for row in _list(rows):
        if not (isinstance(row, list) and len(row) == 2 and all(type(n) is int for n in row)):
            raise ValueError(f"expected a first number and how many, found {row!r:.80}")
        first, length = row
        if not 0 <= first < first + length <= count:
            raise ValueError(f"expected numbers below {count}, found {length} from {first} on")
        yield from range(first, first + length)


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, found {value!r:.80}")
    return value
