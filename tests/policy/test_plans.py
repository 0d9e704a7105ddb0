"""What a plan follows from: storage, copies that are hidden, the budget, failures, changes."""

from __future__ import annotations

import pytest

from checkfreq.policy.frequency import FrequencyPolicy, Reason
from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import RateTuner
from checkfreq.types import SnapshotPlace
from tests.policy.runs import Costs, Run


def profile(**changes: float) -> Profile:
    costs = {
        "iteration_s": 1.0,
        "overlap_s": 0.5,
        "host_copy_s": 0.25,
        "persist_s": 0.5,
        "durable_s": 0.75,
        "cost_s": 0.2,
        "state_bytes": 515_000_000,
    }
    costs |= changes
    return Profile(cost_upper_s=costs["cost_s"], **costs)  # type: ignore[arg-type]


def run(max_overhead: float = 0.1, **costs: float) -> Run:
    tuner = RateTuner(FrequencyPolicy(max_overhead=max_overhead))
    return Run(tuner, Costs(**costs))  # type: ignore[arg-type]


def test_storage_counts_as_measured_and_not_by_a_constant() -> None:
    slow, fast = (run(0.9, stall_s=0.01, durable_s=seconds) for seconds in (8.25, 2.25))
    for each in (slow, fast):
        each.play(100)
    intervals = [each.tuner.plan.interval_steps for each in (slow, fast) if each.tuner.plan]
    assert intervals == [8, 2]


def test_what_a_copy_hides_behind_is_measured_and_credited() -> None:
    policy = FrequencyPolicy(max_overhead=0.1)
    for overlap_s, place in ((0.5, SnapshotPlace.HOST), (0.1, SnapshotPlace.DEVICE)):
        measured = profile(overlap_s=overlap_s)
        assert policy.place(measured, free_device_bytes=10**12) is place
    measured_by_run = run()
    measured_by_run.play(30)
    found = measured_by_run.tuner.profile()
    assert found is not None
    assert found.overlap_s == 0.5 * measured_by_run.iteration_s


def test_the_first_interval_keeps_the_budget() -> None:
    plan = FrequencyPolicy(max_overhead=0.01).plan(profile(cost_s=0.2))
    assert (plan.interval_steps, plan.reason) == (20, Reason.BUDGET)
    assert plan.predicted_overhead == pytest.approx(0.2 / (20 * 1.0))


def test_the_interval_follows_its_costs_both_ways_and_not_by_steps_of_two() -> None:
    played = run(stall_s=0.5)
    played.play(100)
    assert played.tuner.plan is not None
    assert played.tuner.plan.interval_steps == 5
    played.costs = Costs(stall_s=5.0)
    played.play(600)
    assert played.tuner.plan.interval_steps == 50
    played.costs = Costs(stall_s=0.5)
    played.play(600)
    assert played.tuner.plan.interval_steps in (5, 6)


def test_a_run_that_slows_down_is_not_charged_to_checkpoints() -> None:
    played = run(stall_s=0.5)
    played.play(100)
    played.iteration_s = 3.0  # throttled
    played.play(300)
    found = played.tuner.profile()
    assert found is not None
    assert found.iteration_s == pytest.approx(3.0)
    assert found.cost_s == pytest.approx(0.5, rel=0.1)


def test_failures_count_where_they_are_known() -> None:
    never = FrequencyPolicy(max_overhead=0.1).plan(profile())
    rarely = FrequencyPolicy(max_overhead=0.1, mtbf_s=1_000_000.0).plan(profile())
    assert never.reason is Reason.BUDGET
    assert rarely.reason is Reason.FAILURES
    assert rarely.interval_steps > never.interval_steps
