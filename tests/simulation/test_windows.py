"""The bound within any 200 iterations, and what a cached profile does that is wrong."""

from __future__ import annotations

import pytest

from benchmarks.interval.cached import PROFILES
from benchmarks.interval.loads import KINDS, LOADS
from benchmarks.interval.measure import began_with, simulated

WRONG = [name for name in PROFILES if name not in ("none", "right")]


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
