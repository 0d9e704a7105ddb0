"""The bound within any 200 iterations, and what a cached profile does that is wrong."""

from __future__ import annotations

import pytest

from benchmarks.interval.cached import PROFILES
from benchmarks.interval.loads import KINDS, LOADS
from benchmarks.interval.measure import began_with, simulated
from checkfreq.simulation.windows import WINDOW_ITERATIONS, Windows

WRONG = [name for name in PROFILES if name not in ("none", "right")]


def test_the_worst_stretch_is_the_one_in_which_most_was_added_beyond_the_bound() -> None:
    windows = Windows(bound=0.1)
    for added_s in (0.0, 5.0, 0.0, 0.0, 7.0):
        windows.add(1.0, added_s)
    assert windows.worst_s == pytest.approx(12.0 - 0.5)


def test_what_is_further_apart_than_a_stretch_does_not_add_up() -> None:
    windows = Windows(bound=0.1)
    for at in range(3 * WINDOW_ITERATIONS):
        windows.add(1.0, 30.0 if at in (10, 10 + WINDOW_ITERATIONS) else 0.0)
    assert windows.worst_s == pytest.approx(30.0 - 1.1)  # the first, in a short stretch


def test_a_bound_that_is_kept_everywhere_is_exceeded_nowhere() -> None:
    windows = Windows(bound=0.1)
    for _ in range(2 * WINDOW_ITERATIONS):
        windows.add(1.0, 0.1)
    assert windows.worst_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("load", LOADS)
def test_no_stretch_exceeds_the_bound_by_more_than_the_bucket_holds_and_one_checkpoint(
    load: str, kind: str
) -> None:
    run = simulated(load, "neighbours", 1200, (kind, 0))
    assert run.window <= run.slack


@pytest.mark.parametrize("kind", ["device", "dense"])
@pytest.mark.parametrize("profile", WRONG)
def test_a_cached_profile_that_is_wrong_by_three_times_is_forgotten_after_twenty_iterations(
    profile: str, kind: str
) -> None:
    found = began_with("quiet", profile, 300, (kind, 0))
    without = began_with("quiet", "none", 300, (kind, 0))
    assert found.early <= 1.25 * without.early
    assert found.used <= 1.1
    assert found.window <= found.slack
