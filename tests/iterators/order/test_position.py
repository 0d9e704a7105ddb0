"""A position survives JSON, is small, and refuses damage and other data."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from iterators.errors import CorruptPositionError, ResumeMismatchError
from iterators.order.ledger import Ledger
from iterators.order.position import Identity, Layout, Position, _check

IDENTITY = Identity("feistel-1", 1_281_167, "ImageFolder:1281167:0011223344556677", 2**64 - 1)
POSITION = Position(
    IDENTITY,
    epoch=3,
    position=256_000,
    step=6_004,
    ledger=Ledger.of(range(1000)),
    layout=Layout(8, 256, 12, (("numpy", "2.4.6"), ("torch", "2.13.0+cpu"))),
)


def resealed(without: str = "check", **changes: Any) -> dict[str, Any]:
    """A position with a valid checksum over wrong content."""
    state = {**POSITION.to_dict(), **changes}
    state = {name: value for name, value in state.items() if name not in (without, "check")}
    return {**state, "check": _check(state)}


def test_a_position_survives_json_and_fits_in_a_kilobyte() -> None:
    text = json.dumps(POSITION.to_dict())
    assert len(text) < 1_000
    assert Position.from_dict(json.loads(text)) == POSITION


def test_every_changed_character_is_noticed() -> None:
    text = json.dumps(POSITION.to_dict())
    for index in range(0, len(text), 3):
        damaged = text[:index] + chr(ord(text[index]) ^ 1) + text[index + 1 :]
        try:
            state = json.loads(damaged)
        except ValueError:
            continue
        if state == POSITION.to_dict():
            continue  # a space became another: the same content
        with pytest.raises(CorruptPositionError):
            Position.from_dict(state)


@pytest.mark.parametrize("name", sorted({*POSITION.to_dict()} - {"check", "version"}))
def test_every_missing_field_is_noticed(name: str) -> None:
    with pytest.raises(CorruptPositionError, match="cannot be read"):
        Position.from_dict(resealed(without=name))


@pytest.mark.parametrize(
    "change",
    [
        *({"epoch": -1}, {"epoch": True}, {"position": 1_281_168}, {"position": 1.0}),
        *({"algorithm": 1}, {"ledger": []}, {"layout": {"world": 1}}, {"layout": None}),
    ],
    ids=str,
)
def test_a_position_that_says_the_impossible_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptPositionError, match="cannot be read"):
        Position.from_dict(resealed(**change))


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"version": 3}, "newer version of this library"),
        ([], "a position is a dictionary"),
        ({**POSITION.to_dict(), "epoch": {1, 2}}, "not plain JSON"),
    ],
    ids=["newer", "a list", "a set in it"],
)
def test_what_is_no_position_of_this_version_is_refused(state: Any, reason: str) -> None:
    with pytest.raises(CorruptPositionError, match=reason):
        Position.from_dict(state)


def test_a_position_of_version_1_is_read() -> None:
    assert Position.from_dict(resealed(without="states", version=1)) == POSITION


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 1_281_166), ("fingerprint", "other"), ("seed", 1), ("algorithm", "sequential-1")],
)
def test_other_data_or_a_different_order_is_refused_naming_both(field: str, value: Any) -> None:
    POSITION.require(replace(IDENTITY, tail="drop"))
    with pytest.raises(ResumeMismatchError) as caught:
        POSITION.require(replace(IDENTITY, **{field: value}))
    assert (caught.value.field, caught.value.found) == (field, value)
    assert repr(value) in str(caught.value)
    assert repr(getattr(IDENTITY, field)) in str(caught.value)
