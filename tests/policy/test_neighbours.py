"""What iterations took around a checkpoint, and how far chance moves a comparison with it."""

from __future__ import annotations

import math

import pytest

from checkfreq.policy.neighbours import Level, Neighbours


def known(*times_s: float, start: int = 0) -> Neighbours:
    """Clean iterations that began a second after one another."""
    neighbours = Neighbours()
    for number, seconds in enumerate(times_s, start):
        neighbours.add(float(number), seconds)
    return neighbours


def around(neighbours: Neighbours, at_s: float) -> Level:
    level = neighbours.around(at_s)
    assert level is not None
    return level


@pytest.mark.parametrize("at_s", [0.0, 3.0, -1.0])
def test_one_side_serves_where_the_other_is_not_known(at_s: float) -> None:
    assert around(known(1.0, 2.0, 3.0), at_s) == Level(2.0, 0.0, 3, 0.0)


def test_the_nearest_eight_of_each_side_count() -> None:
    level = around(known(*[9.0] * 5, *[1.0] * 8, *[2.0] * 8, *[9.0] * 5), 13.0)
    assert level == Level(1.5, 1.0, 16, 0.25)


@pytest.mark.parametrize(
    ("num", "count", "noise_s", "sum_s", "weight"),
    [
        (10, 1, 0.0, 0.0, 1 / 11),  # no spread of one iteration is known: numbers tell
        (4, 16, 0.0, 0.0, 0.8),
        (4, 16, 0.2 * math.sqrt(1.25), 0.2, 0.8),  # the same where chance is all there is
        (4, 16, 0.4, 0.2, 0.25),
        (4, 16, 0.4, 0.0, 0.0),  # only the step between its two sides: it tells nothing
    ],
)
def test_a_difference_weighs_as_much_as_it_tells(
    num: float, count: int, noise_s: float, sum_s: float, weight: float
) -> None:
    level = Level(1.0, 0.0, count, 0.25)
    assert level.weight(num, noise_s=noise_s, sum_s=sum_s) == pytest.approx(weight)
