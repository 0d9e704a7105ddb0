"""Which changes of the interval are made, and which are taken for noise."""

from __future__ import annotations

import pytest

from checkfreq.policy.damping import IntervalDamper

BOUND = 0.1


def cautious(steps: int) -> int:
    """Not to be asked unless the interval is to shrink."""
    raise AssertionError(f"an interval that stays or grows was planned again at {steps}")


def damped(damper: IntervalDamper, old: int, *planned: int) -> list[int]:
    """The interval after each plan, with cautious plans that are 5 % longer."""
    found = []
    for new in planned:
        old = damper.steps(old, new, bound=BOUND, cautious=lambda new=new: round(1.05 * new))
        found.append(old)
    return found


@pytest.mark.parametrize(
    ("old", "new", "steps"),
    [
        (20, 20, 20),
        (20, 22, 20),  # a tenth
        (20, 23, 23),
        (20, 18, 20),
        (20, 17, 18),  # not quite as far
        (100, 50, 52),
        (2, 1, 1),
    ],
)
def test_a_change_is_made_if_it_is_more_than_a_tenth(old: int, new: int, steps: int) -> None:
    assert damped(IntervalDamper(), old, new) == [steps]


class TestAChangeThatLasts:
    @pytest.mark.parametrize("new", [19, 21])
    def test_a_small_one_is_made_at_the_sixth_plan_in_a_row(self, new: int) -> None:
        assert damped(IntervalDamper(), 20, *[new] * 6) == [*[20] * 5, new]

    @pytest.mark.parametrize("other", [19, 20])
    def test_one_plan_in_another_direction_starts_the_count_anew(self, other: int) -> None:
        assert set(damped(IntervalDamper(), 20, *[21] * 5, other, *[21] * 5)) == {20}


class TestABoundThatIsBroken:
    @pytest.mark.parametrize(
        ("costs_s", "steps"),
        [
            ([1.0], 20),  # 10 %: just kept
            ([1.1], 21),
            ([100.0, *[0.5] * 8], 20),  # eight checkpoints later it is forgotten
            ([100.0, *[0.5] * 7], 21),
        ],
    )
    def test_a_small_rise_is_made_at_once(self, costs_s: list[float], steps: int) -> None:
        damper = IntervalDamper()
        for index, cost_s in enumerate(costs_s, start=1):
            damper.add_checkpoint(cost_s, productive_s=10.0 * index)
        assert damped(damper, 20, 21) == [steps]
