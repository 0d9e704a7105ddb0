"""The measured costs of a run as a value."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from statistics import NormalDist
from typing import Any

import pytest

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import Profile
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


@pytest.mark.parametrize(
    ("device_copy_s", "place"), [(None, SnapshotPlace.HOST), (0.002, SnapshotPlace.DEVICE)]
)
def test_a_profile_survives_a_round_trip_through_json(
    device_copy_s: float | None, place: SnapshotPlace
) -> None:
    profile = replace(PROFILE, device_copy_s=device_copy_s, place=place)
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"iteration_s": 0.0}, r"Profile\.iteration_s: expected more than 0 s, got 0"),
        ({"cost_upper_s": 0.0}, "cost_upper_s: expected at least cost_s = 0.01, got 0"),
        ({"persist_s": 1e300}, r"Profile\.persist_s: expected seconds, got 1e\+300"),
        *(
            ({"persist_s": value}, r"Profile\.persist_s: expected a finite number >= 0, got")
            for value in (None, float("nan"), -1, "1", True, 10**400)
        ),
        ({"place": "disk"}, r"Profile\.place: unknown place"),
        ({"place": []}, r"Profile\.place: unknown place"),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Profile.from_dict({**PROFILE.to_dict(), **parts})


def test_a_missing_and_an_unknown_field_are_named() -> None:
    data = {**PROFILE.to_dict(), "bandwidth": 515}
    del data["cost_s"]
    with pytest.raises(ConfigError, match="missing or unknown: bandwidth, cost_s"):
        Profile.from_dict(data)


def test_costs_that_are_higher_on_another_rank_count() -> None:
    raised = PROFILE.at_least({"persist_s": 2.0, "cost_s": 0.005, "iteration_s": 9.0})
    assert raised == replace(PROFILE, persist_s=2.0)
    assert PROFILE.at_least(PROFILE.shared_costs()) is PROFILE


def test_the_interval_is_planned_so_that_noise_seldom_breaks_the_bound_by_a_tenth() -> None:
    assert PROFILE.planned_cost_s == PROFILE.cost_s
    noisy = replace(PROFILE, cost_error_s=0.003)
    upper_s = NormalDist(0.01, 0.003).inv_cdf(0.975)
    assert noisy.planned_cost_s == pytest.approx(upper_s / 1.1, rel=1e-3)


def test_a_little_noise_does_not_make_it_longer_and_a_lot_by_no_more_than_three_quarters() -> None:
    assert replace(PROFILE, cost_error_s=0.0005).planned_cost_s == PROFILE.cost_s
    assert replace(PROFILE, cost_error_s=1.0).planned_cost_s == pytest.approx(0.0175)
