"""The states of a pass, and what each asks for before the next pass, as tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from iterators.loop.boundary_rule import BoundaryRule
from iterators.loop.cursor import Progress
from iterators.loop.passes import MOVES, Pass, PassState, Settlement

OPEN, EXHAUSTED, LEFT, PAUSED, SETTLED = PassState
NOTHING, CLOSE_EPOCH, TAKE_BACK, PASS_BOUNDARY = Settlement


@dataclass
class Updates:
    """Counts weight updates, as a manager does."""

    update_attempts: int = 0


def ended(
    state: PassState,
    *,
    manager: Updates | None = None,
    accumulate: int | None = None,
    updates: int = 0,
    boundaries: int = 0,
) -> Pass:
    """A pass that handed out batches, saw ``updates`` attempted, and ended in ``state``."""
    rule = BoundaryRule(manager, accumulate=accumulate)
    one = Pass.opened(rule, Progress())
    rule.start_group()
    for _ in range(boundaries):
        one.boundary_passed(Progress())
    if manager is not None:
        manager.update_attempts += updates
    one.end(state)
    return one


LEGAL = [
    (OPEN, EXHAUSTED),
    (OPEN, LEFT),
    (OPEN, PAUSED),
    (OPEN, SETTLED),
    (EXHAUSTED, SETTLED),
    (LEFT, PAUSED),
    (LEFT, SETTLED),
    (PAUSED, SETTLED),
]


def test_the_legal_moves_are_these_and_no_others() -> None:
    moves = [(old, new) for old, new in itertools.product(PassState, repeat=2) if new in MOVES[old]]
    assert moves == LEGAL


@pytest.mark.parametrize("state", [EXHAUSTED, LEFT, PAUSED, SETTLED])
def test_a_pass_ends_once(state: PassState) -> None:
    one = ended(state)
    with pytest.raises(AssertionError, match=f"{state.name} cannot end"):
        one.end(LEFT)


@pytest.mark.parametrize("state", [OPEN, EXHAUSTED, PAUSED, SETTLED])
def test_only_a_pass_that_was_left_can_be_paused_afterwards(state: PassState) -> None:
    one = Pass(BoundaryRule(None, accumulate=None), Progress(), state=state)
    if PAUSED in MOVES[state]:
        one.pause()
        assert one.state is PAUSED
    else:
        with pytest.raises(AssertionError, match="no legal move"):
            one.pause()


def test_settling_leaves_an_open_pass_open_and_may_be_repeated() -> None:
    one = Pass.opened(BoundaryRule(None, accumulate=None), Progress())
    one.settle()
    assert one.state is OPEN
    one.end(EXHAUSTED)
    for _ in range(2):
        one.settle()
        assert one.state is SETTLED


# With a manager that counts updates: (state, updates attempted, boundaries passed) -> settlement.
@pytest.mark.parametrize(
    ("state", "updates", "boundaries", "expected"),
    [
        (SETTLED, 0, 0, NOTHING),
        (SETTLED, 1, 0, NOTHING),
        (EXHAUSTED, 0, 0, CLOSE_EPOCH),
        (EXHAUSTED, 1, 0, CLOSE_EPOCH),
        (EXHAUSTED, 0, 3, CLOSE_EPOCH),
        (LEFT, 0, 0, TAKE_BACK),
        (LEFT, 1, 0, CLOSE_EPOCH),
        (LEFT, 0, 1, CLOSE_EPOCH),
        (LEFT, 1, 1, CLOSE_EPOCH),
        (PAUSED, 0, 0, TAKE_BACK),
        (PAUSED, 1, 0, PASS_BOUNDARY),
        (PAUSED, 0, 1, TAKE_BACK),
        (PAUSED, 1, 1, PASS_BOUNDARY),
    ],
)
def test_what_an_ended_pass_asks_for(
    state: PassState, updates: int, boundaries: int, expected: Settlement
) -> None:
    one = ended(state, manager=Updates(), updates=updates, boundaries=boundaries)
    assert one.settlement(pending=1) is expected


# With accumulate=3, where updates do not count but batches do.
@pytest.mark.parametrize(
    ("state", "pending", "updates", "expected"),
    [
        (LEFT, 1, 0, TAKE_BACK),
        (LEFT, 1, 1, TAKE_BACK),
        (LEFT, 3, 0, TAKE_BACK),
        (LEFT, 3, 1, CLOSE_EPOCH),
        (PAUSED, 1, 0, NOTHING),
        (PAUSED, 3, 0, PASS_BOUNDARY),
    ],
)
def test_what_an_ended_pass_asks_for_where_batches_are_counted(
    state: PassState, pending: int, updates: int, expected: Settlement
) -> None:
    one = ended(state, manager=Updates(), accumulate=3, updates=updates)
    assert one.settlement(pending) is expected


@pytest.mark.parametrize(
    ("state", "pending", "expected"),
    [
        (LEFT, 1, CLOSE_EPOCH),
        (LEFT, 0, TAKE_BACK),
        (PAUSED, 1, PASS_BOUNDARY),
        (PAUSED, 0, TAKE_BACK),
    ],
)
def test_without_a_manager_every_batch_is_an_update(
    state: PassState, pending: int, expected: Settlement
) -> None:
    assert ended(state).settlement(pending) is expected


def test_nothing_is_asked_of_a_pass_that_is_open() -> None:
    one = Pass.opened(BoundaryRule(Updates(), accumulate=None), Progress())
    assert one.settlement(pending=1) is NOTHING


def test_updates_before_a_pass_do_not_count_for_it() -> None:
    manager = Updates()
    rule = BoundaryRule(manager, accumulate=None)
    rule.start_group()
    manager.update_attempts += 1  # for gradients carried over from an earlier pass
    one = Pass.opened(rule, Progress())
    assert rule.is_due(1)
    assert not one.has_trained(1)


def test_a_pass_goes_back_to_its_last_boundary_or_else_to_its_start() -> None:
    start, later = Progress(place=4), Progress(place=8)
    one = Pass.opened(BoundaryRule(None, accumulate=None), start)
    assert one.last_boundary is start
    one.boundary_passed(later)
    assert one.last_boundary is later
