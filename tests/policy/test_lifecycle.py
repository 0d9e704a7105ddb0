"""The states of an attempt and their legal moves."""

from __future__ import annotations

import itertools

import pytest

from checkfreq.policy.lifecycle import AttemptState, moved

S = AttemptState
LEGAL = {
    (S.COPYING, S.PERSISTING),
    (S.COPYING, S.VOID),
    (S.PERSISTING, S.COMMITTED),
    (S.PERSISTING, S.FAILED),
}


@pytest.mark.parametrize(
    ("current", "target"),
    [*itertools.product(AttemptState, repeat=2)],
    ids=lambda state: state.name,
)
def test_exactly_these_moves_are_legal(current: AttemptState, target: AttemptState) -> None:
    if (current, target) in LEGAL:
        assert moved(current, target) is target
    else:
        with pytest.raises(AssertionError, match=f"illegal move {current.name} -> {target.name}"):
            moved(current, target)


def test_an_attempt_owns_its_slot_until_an_end_state() -> None:
    assert {state for state in AttemptState if state.ended} == {S.COMMITTED, S.FAILED, S.VOID}
