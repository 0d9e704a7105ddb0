"""The instants, sizes and layouts at which exactly-once is easiest to lose.

Each test scripts the lives of one run; ``check_lives`` compares every sample it hands out and
every position it merges with those of an undisturbed run.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest

from iterators import CFIterator, ResumableDataLoader
from iterators.testing import End, Life, check_lives
from tests.iterators.datasets import Augmented
from tests.iterators.ranks import rank_of

pytestmark = pytest.mark.slow


#: In an epoch of 24 samples, which are four global batches of the first life.
INSTANTS = {
    "before the first batch": Life(2, 3, 0),
    "first batch, before its boundary": Life(2, 3, 1),
    "at the first boundary": Life(2, 3, 1, End.CLOSED),
    "between delivery and update": Life(2, 3, 3),
    "last batch, before its boundary": Life(2, 3, 4),
    "at the epoch's end": Life(2, 3, 4, End.CLOSED),
    "first batch of the next epoch, before its boundary": Life(2, 3, 5),
    "last batch of all, before its boundary": Life(2, 3, 8),
    "at the end of all": Life(2, 3, 8, End.CLOSED),
}


@pytest.mark.parametrize(("end", "redone"), [(End.KILLED, 1), (End.CLOSED, 0)])
@pytest.mark.parametrize("every", [2, 5])
def test_only_the_batch_without_a_boundary_is_served_again(
    every: int, end: End, redone: int
) -> None:
    loaded = []

    def counted(batch: list[Any]) -> list[Any]:
        loaded.append(len(batch))
        return batch

    restarts = check_lives(rank_of(24), repeat(Life(1, 4, every, end)), samples_of=counted)
    undisturbed = 2 * 24
    assert len(loaded) == undisturbed + 2 * len(rank_of(24)(0, 1, 4)) + redone * restarts


@pytest.mark.parametrize(("world", "batch"), [(2, 3), (5, 1), (1, 4)])
@pytest.mark.parametrize("instant", INSTANTS.values(), ids=INSTANTS)
def test_ended_at_the_instant_resumed_ended_and_resumed_again(
    instant: Life, world: int, batch: int
) -> None:
    """The lives between serve nothing: what they save is what they loaded."""
    between = [Life(world, batch, 0), Life(3, 1, 0, End.CLOSED)]
    check_lives(rank_of(24), [instant, *between, instant, Life(world, batch)])


@pytest.mark.parametrize("n", [1, 3, 7, 21])
def test_sizes_that_no_layout_divides(n: int) -> None:
    """Fewer samples than ranks, than a batch, than a global batch; and remainders of each."""
    lives = [
        Life(5, 4, 1),
        Life(5, 4, 1, End.CLOSED),
        Life(3, 2, 2),
        Life(4, 1, 2, End.CLOSED),
        Life(2, 16, 1, End.CLOSED),
        Life(5, 1, 2),
        Life(2, 3),
    ]
    check_lives(rank_of(n), lives, epochs=5)


@pytest.mark.parametrize("n", [8, 13])
def test_a_tail_too_short_for_the_next_layout_is_dropped(n: int) -> None:
    lives = [Life(2, 2, 1, End.CLOSED), Life(1, 3, 1, End.CLOSED), Life(4, 2, 1), Life(3, 1)]
    check_lives(rank_of(n, tail="drop"), lives, epochs=3)


@pytest.mark.parametrize("end", End)
@pytest.mark.parametrize("served", [1, 2, 3, 6])
def test_ended_at_any_point_of_a_group_of_accumulated_batches_whose_number_may_change(
    served: int, end: End
) -> None:
    """Groups of three batches: the position is that before the group, or behind all of it."""
    accumulate = iter([1, 3, 3, 3, 3, 3, 2])

    def make(rank: int, world: int, batch: int) -> CFIterator:
        return rank_of(23, accumulate=next(accumulate))(rank, world, batch)

    check_lives(make, [Life(2, 2, served, end), Life(3, 1, served, end), Life(1, 4)])


def test_the_position_of_one_rank_alone_is_noticed_when_it_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = [CFIterator(ResumableDataLoader(Augmented(12), 2, rank=r, world=2)) for r in range(2)]
    for _ in zip(*(one.steps(2) for one in ranks), strict=True):
        pass
    merged = ranks[0].merged_state([one.state_dict() for one in ranks])
    assert merged is not None
    for state, exact in ((merged, True), (ranks[0].state_dict(), None)):
        resumed = CFIterator(ResumableDataLoader(Augmented(12), 3))
        resumed.load_state_dict(state)
        for _ in resumed.epochs(1):
            for _ in resumed:
                pass
        assert resumed.last_report is not None
        assert resumed.last_report.exact is exact
        assert ("accounts for 4 of the 8 samples served so far" in caplog.text) == (exact is None)
