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


def resealed(**changes: Any) -> dict[str, Any]:
    """A position with a valid checksum over wrong content."""
    state = {**POSITION.to_dict(), **changes}
    state.pop("check")
    return {**state, "check": _check(state)}


def test_a_position_survives_json_and_fits_in_a_kilobyte() -> None:
    text = json.dumps(POSITION.to_dict())
    assert len(text) < 1_000
    assert Position.from_dict(json.loads(text)) == POSITION


def test_every_changed_character_is_noticed() -> None:
    text = json.dumps(POSITION.to_dict())
    for index in range(len(text)):
        damaged = text[:index] + chr(ord(text[index]) ^ 1) + text[index + 1 :]
        try:
            state = json.loads(damaged)
        except ValueError:
            continue
        if state == POSITION.to_dict():
            continue  # a space became another: the same content
        with pytest.raises(CorruptPositionError):
            Position.from_dict(state)


@pytest.mark.parametrize("name", sorted(POSITION.to_dict()))
def test_every_missing_field_is_noticed(name: str) -> None:
    state = POSITION.to_dict()
    del state[name]
    with pytest.raises(CorruptPositionError):
        Position.from_dict(state)
    if name not in ("check", "version"):
        content = {key: value for key, value in state.items() if key != "check"}
        with pytest.raises(CorruptPositionError, match="cannot be read"):
            Position.from_dict({**content, "check": _check(content)})


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": True},
        {"position": 1_281_168},
        {"position": 1.0},
        {"algorithm": 1},
        {"ledger": []},
        {"ledger": {"count": 1}},
        {"layout": {"world": 1}},
        {"layout": None},
    ],
)
def test_a_position_that_says_the_impossible_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptPositionError, match="cannot be read"):
        Position.from_dict(resealed(**change))


def test_a_newer_version_is_refused_with_a_sentence() -> None:
    with pytest.raises(CorruptPositionError, match="newer version of this library"):
        Position.from_dict({"version": 3})


def test_a_position_of_version_1_is_read() -> None:
    state = {
        key: value for key, value in POSITION.to_dict().items() if key not in ("check", "states")
    }
    state["version"] = 1
    assert Position.from_dict({**state, "check": _check(state)}) == POSITION


def test_the_loaders_own_states_are_kept_in_the_order_of_the_ranks() -> None:
    ranks = [replace(POSITION, states=({"rank": rank},)) for rank in range(3)]
    merged = ranks[0].merged(*ranks[1:])
    assert merged.states == ({"rank": 0}, {"rank": 1}, {"rank": 2})
    assert Position.from_dict(json.loads(json.dumps(merged.to_dict()))) == merged


def test_the_place_at_which_an_epoch_was_left_is_kept_by_all_ranks() -> None:
    left = replace(POSITION, left_at=7)
    assert Position.from_dict(json.loads(json.dumps(left.merged(left).to_dict()))).left_at == 7


@pytest.mark.parametrize("state", [[], "position", None])
def test_what_is_not_a_dictionary_is_refused(state: Any) -> None:
    with pytest.raises(CorruptPositionError, match="a position is a dictionary"):
        Position.from_dict(state)


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(CorruptPositionError, match="not plain JSON"):
        Position.from_dict({**POSITION.to_dict(), "epoch": {1, 2}})


@pytest.mark.parametrize(
    ("field", "value"),
    [("n", 1_281_166), ("fingerprint", "other"), ("seed", 1), ("algorithm", "sequential-1")],
)
def test_other_data_or_a_different_order_is_refused_naming_both(field: str, value: Any) -> None:
    live = replace(IDENTITY, **{field: value})
    with pytest.raises(ResumeMismatchError) as caught:
        POSITION.require(live)
    assert (caught.value.field, caught.value.found) == (field, value)
    assert repr(value) in str(caught.value)
    assert repr(getattr(IDENTITY, field)) in str(caught.value)


def test_a_different_tail_policy_is_not_a_different_order() -> None:
    POSITION.require(replace(IDENTITY, tail="drop"))


def test_positions_of_all_ranks_merge_into_one() -> None:
    other = replace(POSITION, ledger=Ledger.of(range(1000, 1500)))
    assert POSITION.merged(other).ledger == Ledger.of(range(1500))
    assert replace(POSITION.merged(other), ledger=POSITION.ledger) == POSITION


def test_ranks_at_different_points_do_not_merge() -> None:
    with pytest.raises(ValueError, match="different points"):
        POSITION.merged(replace(POSITION, position=1))
