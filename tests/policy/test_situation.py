"""A machine that is slow is told from checkpoints that are costly."""

from __future__ import annotations

import pytest

from checkfreq.policy.situation import Situation, Situations
from tests.policy.runs import Costs, Run
from tests.policy.test_tuner import run


def seen(*, times_s: list[float], costs_s: list[float], noise_s: float = 0.0) -> Situation:
    situations = Situations()
    for seconds in times_s:
        situations.add_clean(seconds)
    for seconds in costs_s:
        situations.add_cost(seconds)
    return situations.now(cost_error_s=noise_s)


@pytest.mark.parametrize(
    ("times_s", "costs_s", "situation"),
    [
        ([], [], Situation.USUAL),
        ([1.0] * 20 + [2.0] * 8, [1.0] * 7, Situation.USUAL),  # nothing is usual yet
        ([1.0] * 100, [1.0] * 20, Situation.USUAL),
        ([1.0] * 100 + [9.0] * 3, [1.0] * 20 + [9.0], Situation.USUAL),  # a few are outliers
        ([1.0] * 100 + [1.2] * 8, [1.0] * 20 + [1.4] * 4, Situation.USUAL),
        ([1.0] * 100 + [1.5] * 8, [1.0] * 20, Situation.SLOW),
        ([1.0] * 100, [1.0] * 20 + [3.0] * 4, Situation.COSTLY),
        ([1.0] * 100 + [1.5] * 8, [1.0] * 20 + [3.0] * 4, Situation.BOTH),
        ([1.0] * 100 + [1.5] * 8 + [1.0] * 8, [1.0] * 20, Situation.USUAL),
        ([1.0] * 100 + [1.5] * 2000, [1.0] * 20, Situation.USUAL),  # it has become usual
    ],
)
def test_what_is_different_is_named(
    times_s: list[float], costs_s: list[float], situation: Situation
) -> None:
    assert seen(times_s=times_s, costs_s=costs_s) is situation


def played() -> Run:
    training = run(Costs(stall_s=0.5))
    training.play(400)
    assert training.tuner.situation is Situation.USUAL
    return training


def test_a_run_whose_iterations_become_slow_and_fast_again() -> None:
    training = played()
    training.iteration_s = 2.0
    training.play(20)
    assert training.tuner.situation is Situation.SLOW
    training.iteration_s = 1.0
    training.play(20)
    assert training.tuner.situation is Situation.USUAL
