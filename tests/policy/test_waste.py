"""Optimal intervals in closed form, against hand-computed values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from checkfreq.errors import ConfigError
from checkfreq.policy.waste import daly_interval_s, goodput, young_interval_s


def test_young_and_daly_by_hand() -> None:
    assert young_interval_s(2, mtbf_s=10_000) == 200
    # o / 2M = 1e-4, its root 0.01: 200 x (1 + 0.01 / 3 + 1e-4 / 9) - 2
    assert daly_interval_s(2, mtbf_s=10_000) == pytest.approx(198.66888889)


@pytest.mark.parametrize("cost_s", [200, 201, 1e6])
def test_checkpoints_that_cost_more_than_two_lifetimes_are_taken_once_in_one(cost_s: float) -> None:
    assert daly_interval_s(cost_s, mtbf_s=100) == 100


def test_goodput_of_a_hopeless_run_is_nothing_rather_than_an_overflow() -> None:
    assert goodput(1e6, cost_s=1, mtbf_s=1) == 0
    assert goodput(1, cost_s=1, mtbf_s=1, restart_s=1e6) == 0


CALLS: dict[str, Callable[..., float]] = {
    "cost_s": lambda value: daly_interval_s(value, mtbf_s=1),
    "mtbf_s": lambda value: daly_interval_s(1, mtbf_s=value),
    "interval_s": lambda value: goodput(value, cost_s=1, mtbf_s=1),
    "restart_s": lambda value: goodput(1, cost_s=1, mtbf_s=1, restart_s=value),
}


@pytest.mark.parametrize("name", CALLS)
def test_nonsense_is_refused_by_name_with_what_was_found(name: str) -> None:
    for value in (float("nan"), float("inf"), -1.0):
        said = f"{name}: expected finite seconds >=? 0, got {value}"
        with pytest.raises(ConfigError, match=said):
            CALLS[name](value)
    if name in ("mtbf_s", "interval_s"):
        with pytest.raises(ConfigError, match=f"{name}: expected finite seconds > 0, got 0"):
            CALLS[name](0.0)
