"""The four-term interval, its reason, the place of snapshots."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.errors import ConfigError
from checkfreq.policy.frequency import FrequencyPolicy, Reason
from checkfreq.policy.profile import Profile
from checkfreq.policy.waste import daly_interval_s
from checkfreq.types import Objective, SnapshotPlace

HOST, DEVICE = SnapshotPlace.HOST, SnapshotPlace.DEVICE


def profile(**changes: Any) -> Profile:
    """An iteration of 1 s and a checkpoint that costs one of them."""
    values: dict[str, Any] = {
        "iteration_s": 1.0,
        "overlap_s": 0.5,
        "host_copy_s": 0.2,
        "persist_s": 1.0,
        "durable_s": 1.2,
        "cost_s": 1.0,
        "state_bytes": 1000,
    }
    values |= changes
    return Profile(**{"cost_upper_s": values["cost_s"], **values})


def policy(max_overhead: float = 0.05, **changes: Any) -> FrequencyPolicy:
    return FrequencyPolicy(max_overhead=max_overhead, **changes)


@pytest.mark.parametrize(
    ("bound", "cost_s", "steps"),
    [
        (0.05, 1.0, 20),  # the paper's example: one iteration, 5 %
        (0.035, 0.35, 10),
        (0.1, 0.3, 3),  # 0.3 / 0.1 is more than 3 in floating point
    ],
)
def test_the_budget_term_is_that_of_the_paper(bound: float, cost_s: float, steps: int) -> None:
    plan = policy(bound).plan(profile(cost_s=cost_s, persist_s=0.1))
    assert (plan.interval_steps, plan.reason) == (steps, Reason.BUDGET)


def test_the_budget_term_allows_for_noise_but_the_prediction_is_the_mean() -> None:
    plan = policy(0.05).plan(profile(cost_s=1.0, cost_error_s=0.3, cost_upper_s=2.0, persist_s=0.1))
    assert plan.interval_steps == 29  # (1 + 1.96 * 0.3) / 1.1 / 0.05
    assert plan.predicted_overhead == pytest.approx(1 / 29)


@pytest.mark.parametrize(
    ("num_slots", "copy_s", "persist_s", "steps"),
    [(2, 2.0, 6.5, 7), (2, 8.0, 6.5, 8), (3, 2.0, 6.5, 7), (1, 2.0, 6.5, 9)],
)
def test_the_storage_term_never_queues(
    num_slots: int, copy_s: float, persist_s: float, steps: int
) -> None:
    costs = profile(cost_s=0.01, host_copy_s=copy_s, persist_s=persist_s)
    plan = policy(num_slots=num_slots).plan(costs)
    assert (plan.interval_steps, plan.reason) == (steps, Reason.STORAGE)


def test_failures_so_rare_that_more_checkpoints_would_waste_time_decide() -> None:
    plan = policy(mtbf_s=100_000).plan(profile(cost_s=0.5))
    # sqrt(2 x 0.5 x 100,000) = 316.2 iterations, Daly's terms less than one
    assert (plan.interval_steps, plan.reason) == (316, Reason.FAILURES)


def test_goodput_pays_more_than_the_bound_where_failures_are_frequent() -> None:
    frequent = policy(mtbf_s=50, objective=Objective.GOODPUT)
    plan = frequent.plan(profile())
    tau_s = daly_interval_s(1.0, mtbf_s=50)
    assert (plan.interval_steps, plan.reason) == (round(tau_s), Reason.FAILURES)
    assert plan.predicted_overhead > 0.05
    assert frequent.allowed_overhead(plan) == pytest.approx(1.25 * plan.predicted_overhead)


@pytest.mark.parametrize(
    ("copy_s", "device_copy_s", "free", "before", "place"),
    [
        (0.2, 0.0, 10_000, HOST, HOST),  # hidden behind the overlap window: a tie
        (0.9, 0.1, None, HOST, HOST),  # no such memory
        (0.9, 0.1, 999, HOST, HOST),  # too little
        (0.9, None, 1000, HOST, DEVICE),  # unknown: tried
        (0.501, None, 1000, HOST, HOST),  # not worth the memory
        (0.9, 0.32, 1000, HOST, HOST),  # saves 0.08 s, less than a tenth of the copy
        (0.9, 0.30, 1000, HOST, DEVICE),
        (0.9, 0.48, 1000, DEVICE, DEVICE),  # loses 0.08 s, less than a tenth of the copy
        (0.9, 0.50, 1000, DEVICE, HOST),
        (0.9, 0.10, 999, DEVICE, HOST),
    ],
)
def test_snapshots_are_taken_where_less_of_the_copy_is_exposed_by_a_margin(
    copy_s: float,
    device_copy_s: float | None,
    free: int | None,
    before: SnapshotPlace,
    place: SnapshotPlace,
) -> None:
    costs = profile(host_copy_s=copy_s, device_copy_s=device_copy_s, place=before)
    assert policy().plan(costs, free_device_bytes=free).place is place


@pytest.mark.parametrize(
    ("boundary_s", "steps", "overhead"),
    [
        (0.0, 20, 0.05),
        (0.02, 34, 1 / 34 + 0.02),  # 1 / 0.03 = 33.3
        (0.04, 40, 0.065),  # half is left for checkpoints, and the bound is not to be had
    ],
)
def test_the_cost_of_each_boundary_is_deducted_from_the_budget(
    boundary_s: float, steps: int, overhead: float
) -> None:
    plan = policy(0.05).plan(profile(boundary_s=boundary_s))
    assert (plan.interval_steps, plan.reason) == (steps, Reason.BUDGET)
    assert plan.predicted_overhead == pytest.approx(overhead)


@pytest.mark.parametrize(
    ("costs", "settings", "said"),
    [
        ({"cost_s": 0.0635, "persist_s": 7.0}, {}, "every 7 iterations: bound by storage, 0.91 % "),
        ({"cost_s": 0.0}, {}, "every iteration: nothing in the way, 0 % of 5 % used, expected lo"),
        ({"boundary_s": 0.25}, {}, "overhead budget, 28 % of 5 % used (25 % by boundaries, which"),
        (
            {},
            {"mtbf_s": 200.0, "objective": Objective.GOODPUT},
            "at the optimum for failures, 5.3 % used, expected loss",  # the bound is left out
        ),
    ],
)
def test_a_plan_explains_itself_in_a_line(
    costs: dict[str, float], settings: dict[str, Any], said: str
) -> None:
    assert said in policy(**settings).plan(profile(**costs)).explain(0.05)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_overhead": 1.0}, "max_overhead: expected a fraction between 0 and 1, got 1.0"),
        ({"num_slots": 0}, "num_slots: expected at least 1, got 0"),
        ({"mtbf_s": 0.0}, "mtbf_s: expected None or finite .* got 0.0"),
        ({"mtbf_s": math.inf}, "mtbf_s: expected None or finite .* got inf"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        policy(**settings)


SECONDS = st.floats(0, 1e4)
BOUNDS = st.floats(0.001, 0.999)
PROFILES = st.builds(
    profile,
    iteration_s=st.floats(1e-4, 1e4),
    overlap_s=SECONDS,
    host_copy_s=SECONDS,
    persist_s=SECONDS,
    durable_s=SECONDS,
    cost_s=SECONDS,
    state_bytes=st.integers(0, 2**50),
    device_copy_s=st.none() | SECONDS,
    boundary_s=st.sampled_from([0.0, 1e-6, 1e-3]) | SECONDS,
)
POLICIES = st.builds(
    policy,
    BOUNDS,
    mtbf_s=st.none() | st.floats(1, 1e8),
    num_slots=st.integers(1, 3),
)


@given(PROFILES, POLICIES)
def test_the_interval_is_never_below_a_term_and_equals_the_one_that_decided(
    costs: Profile, chosen: FrequencyPolicy
) -> None:
    plan, t = chosen.plan(costs), costs.iteration_s
    busy_s = max(costs.persist_s, costs.host_copy_s)
    if chosen.num_slots == 1:
        busy_s = costs.persist_s + costs.host_copy_s
    earned_s = chosen.max_overhead * t
    terms = {
        Reason.FLOOR: 1.0,
        Reason.STORAGE: busy_s / t,
        Reason.BUDGET: costs.cost_s / max(earned_s - costs.boundary_s, earned_s / 2),
    }
    if chosen.mtbf_s is not None:
        terms[Reason.FAILURES] = daly_interval_s(costs.cost_s, mtbf_s=chosen.mtbf_s) / t - 0.5
    for term in terms.values():
        assert plan.interval_steps >= term * (1 - 1e-8)
    assert plan.interval_steps <= terms[plan.reason] * (1 + 1e-8) + 1


@given(PROFILES, POLICIES)
def test_the_predicted_overhead_is_within_the_bound_unless_boundaries_take_more_than_half(
    costs: Profile, chosen: FrequencyPolicy
) -> None:
    bound, boundaries = chosen.max_overhead, costs.boundary_s / costs.iteration_s
    most = bound + max(0.0, boundaries - bound / 2)
    assert chosen.plan(costs).predicted_overhead <= most * (1 + 1e-8)


def test_an_extremely_short_iteration_has_a_finite_interval() -> None:
    plan = policy(mtbf_s=1e6).plan(profile(iteration_s=5e-324))
    assert plan.interval_steps == 10**12
    assert math.isfinite(plan.expected_loss_s)
