"""When a loop is taken to run ahead of its updates, by the number of batches before each."""

from __future__ import annotations

import pytest

from iterators.loop.ahead import AheadWatch
from iterators.testing import FakeManager


def watched(*passes: list[int]) -> bool:
    """Whether there is more to see after passes with these numbers of batches before an update."""
    manager = FakeManager()
    watch = AheadWatch("train", manager)
    goes_on = True
    for groups in passes:
        watch.starts_pass()
        for size in groups:
            for _ in range(size):
                goes_on = goes_on and watch.delivers()
            manager.weight_update()
    return goes_on


@pytest.mark.parametrize(
    ("passes", "ahead"),
    [([[4, 1, 1, 1, 1, 1]], 3), ([[5, 4, 4, 4, 4, 4]], 1), ([[2, 1, 1]] * 4, 1)],
)
def test_a_constant_surplus_before_the_first_update_is_warned_of(
    passes: list[list[int]], ahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert not watched(*passes)
    (record,) = caplog.records
    assert f"write CFIterator(..., lookahead={ahead})" in record.getMessage()


@pytest.mark.parametrize(
    "passes",
    [
        [[4, 4, 4, 4, 4, 4]],  # accumulation
        [[1, 4, 4, 4, 4, 4]],  # with an update at batch 0
        [[100, 1, 1, 1, 1, 1]],  # a warm-up
        [[3, 2, 4, 1]],  # groups of some number of tokens
        [[2, 1, 1], [1, 1, 1]],  # one batch was skipped, once
    ],
)
def test_other_loops_are_not(passes: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    assert not watched(*passes)
    assert not caplog.records


@pytest.mark.parametrize("passes", [[[2, 1, 1, 1]], [[2, 1], [2, 1]], [[3], [3]]])
def test_it_takes_some_updates_to_tell(passes: list[list[int]]) -> None:
    assert watched(*passes)
