"""The measured costs of a run as a value."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import Profile, is_amount
from checkfreq.types import SnapshotPlace

PROFILE = Profile(
    iteration_s=0.1,
    overlap_s=0.08,
    host_copy_s=0.05,
    persist_s=0.4,
    durable_s=0.45,
    cost_s=0.01,
    cost_upper_s=0.02,
    state_bytes=1 << 30,
)
NUMBERS = [field.name for field in fields(Profile) if field.name != "place"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), -1, "1", True, 10**400])
def test_nonsense_is_refused_by_name_with_what_was_found(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Profile\.{name}: expected a finite number >= 0, got"):
        replace(PROFILE, **{name: value})


@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "device_copy_s"])
def test_only_the_device_copy_may_be_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"Profile\.{name}: .* got None"):
        replace(PROFILE, **{name: None})


def test_an_iteration_of_no_length_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Profile\.iteration_s: expected more than 0 s, got 0"):
        replace(PROFILE, iteration_s=0.0)


def test_an_upper_cost_below_the_cost_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cost_upper_s: expected at least cost_s = 0.01, got 0"):
        replace(PROFILE, cost_upper_s=0.0)


@pytest.mark.parametrize(
    ("device_copy_s", "place"), [(None, SnapshotPlace.HOST), (0.002, SnapshotPlace.DEVICE)]
)
def test_a_profile_survives_a_round_trip_through_json(
    device_copy_s: float | None, place: SnapshotPlace
) -> None:
    profile = replace(PROFILE, device_copy_s=device_copy_s, place=place)
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_a_missing_and_an_unknown_field_are_named() -> None:
    data = {**PROFILE.to_dict(), "bandwidth": 515}
    del data["cost_s"]
    with pytest.raises(ConfigError, match="missing or unknown: bandwidth, cost_s"):
        Profile.from_dict(data)


def test_a_time_longer_than_any_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Profile\.persist_s: expected seconds, got 1e\+300"):
        Profile.from_dict({**PROFILE.to_dict(), "persist_s": 1e300})


@pytest.mark.parametrize("place", ["disk", []])
def test_an_unknown_place_is_refused(place: Any) -> None:
    with pytest.raises(ConfigError, match=r"Profile\.place: unknown place"):
        Profile.from_dict({**PROFILE.to_dict(), "place": place})


@given(st.floats(min_value=0, allow_infinity=False) | st.integers(0, 2**62))
def test_every_finite_number_from_zero_is_an_amount(value: float) -> None:
    assert is_amount(value)


def test_costs_that_are_higher_on_another_rank_count() -> None:
    raised = PROFILE.at_least({"persist_s": 2.0, "cost_s": 0.005, "iteration_s": 9.0})
    assert raised == replace(PROFILE, persist_s=2.0)
    assert PROFILE.at_least({}) is PROFILE


def test_costs_are_scaled_together_and_the_iteration_stays() -> None:
    scaled = PROFILE.with_costs_scaled(1.5)
    names = ("host_copy_s", "persist_s", "cost_s", "cost_upper_s")
    assert [getattr(scaled, name) / getattr(PROFILE, name) for name in names] == pytest.approx(
        [1.5] * len(names)
    )
    assert scaled.iteration_s == PROFILE.iteration_s


def test_a_profile_lists_its_shared_costs() -> None:
    assert PROFILE.shared_costs() == {
        "host_copy_s": 0.05,
        "persist_s": 0.4,
        "durable_s": 0.45,
        "cost_s": 0.01,
        "cost_error_s": 0.0,
        "cost_upper_s": 0.02,
    }
    assert PROFILE.at_least(PROFILE.shared_costs()) is PROFILE


def test_the_interval_is_planned_so_that_noise_seldom_breaks_the_bound_by_a_tenth() -> None:
    assert PROFILE.planned_cost_s == PROFILE.cost_s
    noisy = replace(PROFILE, cost_error_s=0.003)
    upper_s = NormalDist(0.01, 0.003).inv_cdf(0.975)
    assert noisy.planned_cost_s == pytest.approx(upper_s / 1.1, rel=1e-3)


def test_a_little_noise_does_not_make_it_longer_and_a_lot_by_no_more_than_three_quarters() -> None:
    assert replace(PROFILE, cost_error_s=0.0005).planned_cost_s == PROFILE.cost_s
    assert replace(PROFILE, cost_error_s=1.0).planned_cost_s == pytest.approx(0.0175)
