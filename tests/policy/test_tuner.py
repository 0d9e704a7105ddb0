"""The tuner over runs played by hand: when it takes, withholds, defers, measures and learns."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkfreq.policy.frequency import FrequencyPolicy, Reason
from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import PROFILE_ITERATIONS, Iteration, Measured, RateTuner, Verdict
from checkfreq.types import SnapshotPlace
from tests.policy.runs import CACHED, Costs, Run

NAN, INF = float("nan"), float("inf")
FREE = Costs(stall_s=0.0)  # costs nothing, durable within an iteration


def tuner(bound: float = 0.05, *, cached: Profile | None = None, **changes: Any) -> RateTuner:
    dynamic = changes.pop("dynamic", True)
    return RateTuner(FrequencyPolicy(max_overhead=bound, **changes), dynamic=dynamic, cached=cached)


def run(costs: Costs | None = None, **changes: Any) -> Run:
    return Run(tuner(**changes), costs=costs or Costs())


def interval(played: Run) -> int:
    assert played.tuner.plan is not None
    return played.tuner.plan.interval_steps


def gaps(steps: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(steps)]


class TestTheFirstPlan:
    def test_the_first_comes_after_warm_up_which_is_not_measured_and_one_clean_iteration(
        self,
    ) -> None:
        played = run()
        assert played.tuner.measured_overhead is None
        assert played.play(30, extra_s=lambda step: 100.0 if step < 2 else 0.0)[0] == 3
        assert played.tuner.iteration_s == pytest.approx(1.0)

    @pytest.mark.parametrize("stall_s", [0.02, 0.5, 5.0])
    def test_it_and_the_one_after_it_keep_the_bound_but_for_its_own_cost(
        self, stall_s: float
    ) -> None:
        played = run(Costs(stall_s=stall_s))
        for _ in range(300):
            played.play(1)
            assert played.true_s <= 0.05 * played.clean_s + 2 * stall_s
        assert interval(played) == max(1, round(stall_s / 0.05))

    def test_the_plan_comes_when_the_aftermath_of_the_first_one_is_over(self) -> None:
        played = run(Costs(durable_s=1.75))
        played.play(3)
        played.play(2 + 2)  # it touches two
        assert played.tuner.plan is None
        assert played.tuner.profile() is None
        played.play(1)  # the second clean one
        assert played.step == 8
        assert played.tuner.plan is not None
        assert (interval(played), played.tuner.plan.reason) == (10, Reason.BUDGET)

    def test_first_checkpoints_that_keep_failing_are_retried_only_within_the_bound(self) -> None:
        played = run(Costs(stall_s=5.0))
        played.fails = True
        played.play(1000)
        assert played.tuner.overhead_s <= 0.05 * played.tuner.productive_s + 5.0
        assert 8 <= len(played.taken) <= 11

    def test_a_slow_first_checkpoint_is_late_after_ten_iterations(self) -> None:
        played = run()
        played.never_ends = True
        assert played.play(3 + PROFILE_ITERATIONS) == [3]
        assert played.told[Verdict.LATE] == 0
        assert not played.play(5)
        assert played.told[Verdict.LATE] == 5

    def test_a_run_of_epochs_so_short_that_no_iteration_is_regular_is_profiled(self) -> None:
        played = run()
        for _ in range(60):
            played.iterate(is_regular=False)
            played.decide()
        assert interval(played) == 10


class TestBothWays:
    def test_the_interval_rises_with_the_cost_and_falls_with_it(self) -> None:
        played = run(bound=0.05)
        played.play(200)
        assert interval(played) == 10
        played.costs = Costs(stall_s=2.0)
        played.play(800)
        assert interval(played) == 40
        played.costs = Costs(stall_s=0.1)
        played.play(800)
        assert interval(played) <= 3

    def test_the_interval_rises_with_slow_storage_and_falls_when_it_is_fast_again(self) -> None:
        played = run(Costs(stall_s=0.0, durable_s=1.9))
        played.play(100)
        assert interval(played) == 2
        played.costs = Costs(stall_s=0.0, durable_s=19.0)
        played.play(300)
        assert played.tuner.plan is not None
        assert (interval(played), played.tuner.plan.reason) == (19, Reason.STORAGE)
        played.costs = Costs(stall_s=0.0, durable_s=1.9)
        played.play(300)
        assert interval(played) == 2

    def test_a_free_checkpoint_is_taken_at_every_iteration(self) -> None:
        played = run(Costs(stall_s=0.0, durable_s=0.9))
        played.play(50)
        assert interval(played) == 1
        # 96 in a row, then a stretch: the aftermath of the last one and 6 clean iterations.
        assert len(played.play(96 + 2 + 6)) == 96

    def test_intervals_are_counted_from_any_checkpoint_and_from_a_restored_step(self) -> None:
        played = run()
        played.play(100)
        assert interval(played) == 10
        played.play(40)
        played.take(is_periodic=False)
        asked = played.step
        assert played.play(60)[0] >= asked + 10
        fresh = run(FREE, cached=replace(CACHED, cost_s=2.0, cost_upper_s=2.0))
        fresh.step = 1000
        fresh.tuner.continue_from(1000)
        assert fresh.play(60)[0] == 1040


class TestTheBound:
    def test_an_excess_cost_of_a_checkpoint_in_flight_is_not_spent_twice(self) -> None:
        played = run(Costs(stall_s=0.02, copy_s=1.5, durable_s=1.9))
        played.play(300)
        while played.in_flight or played.tuner.balance_s < 0.07:
            played.iterate()
        start_s = played.now_s
        played.take(is_periodic=True)
        now_s = start_s + 1.4
        assert played.tuner.due(step=played.step + 2, now_s=now_s) is Verdict.TAKE
        played.tuner.iteration(Iteration(start_s, now_s, stall_s=0.4))
        assert played.tuner.due(step=played.step + 2, now_s=now_s) is Verdict.NO_BUDGET

    def test_the_cost_of_a_failed_checkpoint_is_charged_but_not_learned(self) -> None:
        played = run(Costs(stall_s=0.5))
        played.play(300)
        before = played.tuner.profile()
        played.costs, played.fails = Costs(stall_s=3.0), True
        spent_s = played.tuner.overhead_s
        played.play(20)
        assert played.tuner.overhead_s >= spent_s + 3.0
        assert played.tuner.profile() == before

    @pytest.mark.parametrize("slower", [0.0, 0.05])
    def test_a_checkpoint_that_hangs_and_fails_is_charged_only_what_is_certain(
        self, slower: float
    ) -> None:
        chance = random.Random(1)
        played = run(Costs(stall_s=0.5))
        played.play(200, extra_s=lambda step: chance.gauss(0.0, 0.02))
        played.costs = Costs(stall_s=0.5, durable_s=2000.0, slowdown=slower)
        played.fails = True
        played.take(is_periodic=True)
        while played.in_flight:
            played.iterate(extra_s=chance.gauss(0.0, 0.02))
        for _ in range(8):
            played.iterate()
        if slower:  # held training back by 100 s
            assert -100 < played.tuner.balance_s < -50
        else:
            assert played.tuner.balance_s > -0.5

    @settings(max_examples=40)
    @given(
        seed=st.integers(0, 2**32),
        bound=st.sampled_from([0.01, 0.035, 0.1]),
        typical_s=st.sampled_from([0.0, 0.05, 0.5, 3.0]),
        beat=st.sampled_from([0.0, 0.05]),
        boundary_s=st.sampled_from([0.0, 0.002]),
        durable_s=st.sampled_from([0.3, 0.95, 3.7]),
        rare=st.sampled_from([0.0, 0.02, 0.1]),
        exempt=st.sampled_from([0.0, 0.01]),
        failing=st.sampled_from([0.0, 0.2]),
    )
    @example(  # slow iterations beside checkpoints that fail
        seed=612097,
        bound=0.035,
        typical_s=0.0,
        beat=0.0,
        boundary_s=0.002,
        durable_s=3.7,
        rare=0.1,
        exempt=0.0,
        failing=0.2,
    )
    def test_true_overhead_never_exceeds_the_bound_by_more_than_is_allowed(
        self,
        seed: int,
        bound: float,
        typical_s: float,
        beat: float,
        boundary_s: float,
        durable_s: float,
        rare: float,
        exempt: float,
        failing: float,
    ) -> None:
        """Allowed: the largest cost, or of those that overlap; those that had to be taken; what
        three outliers hide; and where iterations alternate, what is misjudged of each
        checkpoint, up or down: a random walk.
        """
        chance = random.Random(seed)
        played = Run(tuner(bound), boundary_s=boundary_s)
        told = played.tuner
        together: set[str] = set()
        had_to: set[str] = set()
        largest_s = 0.0
        slow_s: list[float] = []
        for step in range(500):
            factor = 10.0 if chance.random() < 0.1 else chance.uniform(0.5, 1.5)
            slow = chance.uniform(8.0, 40.0) if chance.random() < rare else 0.0
            played.costs = Costs(
                stall_s=typical_s * factor, copy_s=0.1, durable_s=durable_s, slow_s=slow
            )
            played.fails = chance.random() < failing
            before = played.name
            if told.plan is None:
                had_to.add(str(before + 1))
            if chance.random() < exempt:
                played.take(is_periodic=False)
                had_to.add(str(played.name))
            else:
                played.decide()
            if played.name > before:
                together &= set(played.in_flight)
                together.add(str(played.name))
                slow_s.append(slow)
            played.iterate(extra_s=beat if step % 2 else -beat)
            costs_s = played.costs_s
            largest_s = max(largest_s, sum(costs_s[n] for n in together if n not in had_to))
            hidden_s = sum(sorted(slow_s)[-3:])
            exempt_s = sum(costs_s.get(n, 0.0) for n in had_to)
            misjudged_s = beat * math.sqrt(len(costs_s))
            assert (
                played.true_s
                <= bound * played.clean_s + largest_s + exempt_s + hidden_s + misjudged_s + 1e-9
            )


class TestDeferral:
    def test_with_two_slots_a_copy_may_run_while_the_previous_checkpoint_persists(self) -> None:
        played = run(Costs(stall_s=0.0, copy_s=0.4, durable_s=2.2))
        played.play(80)
        assert interval(played) == 2
        assert len(played.in_flight) <= 2
        assert played.told[Verdict.LATE] == 0

    def test_with_one_slot_the_previous_checkpoint_must_be_durable(self) -> None:
        played = run(Costs(stall_s=0.0, copy_s=0.4, durable_s=2.2), num_slots=1)
        played.play(80)
        assert interval(played) == 3
        played.costs = Costs(stall_s=0.0, copy_s=0.4, durable_s=3.2)
        played.play(60)
        assert played.told[Verdict.LATE] > 0
        assert interval(played) == 4

    @pytest.mark.parametrize(("num_slots", "dynamic"), [(1, True), (2, False)])
    def test_a_checkpoint_that_never_ends_defers_the_next_forever(
        self, num_slots: int, dynamic: bool
    ) -> None:
        played = run(FREE, num_slots=num_slots, dynamic=dynamic)
        played.play(100)
        played.never_ends = True
        played.play(10)
        before = len(played.taken)
        assert len(played.in_flight) == 1
        played.told.clear()
        played.play(1000)
        assert len(played.taken) == before
        assert set(played.told) == {Verdict.LATE}


class TestTheBoundary:
    """What each boundary costs, checkpoint or not."""

    @pytest.mark.parametrize(
        ("boundary_s", "steps"),
        [
            (0.02, 19),  # 0.56 / (0.05 - 0.02): it touches one, two are its aftermath
            (0.2, 44),  # 1.1 / 0.025: half of the budget is left for checkpoints
        ],
    )
    def test_its_cost_is_deducted_from_the_budget_and_counted_in_full(
        self, boundary_s: float, steps: int
    ) -> None:
        played = run(Costs(stall_s=0.5))
        played.boundary_s = boundary_s
        played.play(1000)
        profile = played.tuner.profile()
        assert profile is not None
        assert profile.boundary_s == pytest.approx(boundary_s)
        assert profile.iteration_s == pytest.approx(1.0)
        assert profile.cost_s == pytest.approx(0.5 + 3 * boundary_s)
        assert interval(played) == steps
        found = gaps(played.taken[-9:])
        assert max(abs(gap - steps) for gap in found) <= steps // 8 + 1
        while played.tuner._charges._open:
            played.iterate()
        assert played.tuner.overhead_s == pytest.approx(played.true_s)
        assert played.true_overhead <= max(0.05, boundary_s + 0.025)


class TestRhythms:
    def test_of_short_intervals_one_in_four_is_a_step_longer(self) -> None:
        played = run(Costs(stall_s=0.14))  # 2.8
        played.play(200)
        steps = gaps(played.play(400))
        assert {*steps} == {3, 4}
        assert all(sum(steps[i : i + 4]) == 13 for i in range(len(steps) - 3))


class TestComparisons:
    @pytest.mark.parametrize(
        ("paired", "least_s", "most_s"),
        [(True, 0.5, 0.5 + 3 * 0.25), (False, 0.5 + 3 * 0.5, INF)],
        ids=["half way between before and after, or less", "by the time of all"],
    )
    def test_a_change_of_the_machine_under_a_checkpoint_is_not_its_cost(
        self, paired: bool, least_s: float, most_s: float
    ) -> None:
        """Iterations become half as long again just when it begins, and stay so."""
        played = Run(RateTuner(FrequencyPolicy(max_overhead=0.05), paired=paired))
        played.play(300)
        while played.tuner._charges._open or played.tuner.balance_s < 0.5:
            played.iterate()
        spent_s = played.tuner.overhead_s
        played.take(is_periodic=True)
        played.iteration_s = 1.5
        for _ in range(12):
            played.iterate()
        assert least_s <= played.tuner.overhead_s - spent_s <= most_s


class TestTheIterationTime:
    def test_a_time_that_is_too_long_shows_in_checkpoints_that_seem_to_save_time(self) -> None:
        played = run(Costs(stall_s=0.001, durable_s=0.5, slowdown=0.01), bound=0.5)
        played.play(60)
        assert interval(played) == 1
        played.iteration_s = 0.96
        played.play(45)  # too few for the next stretch without checkpoints
        profile = played.tuner.profile()
        assert profile is not None
        assert profile.iteration_s == pytest.approx(0.96, abs=0.006)

    def test_a_pause_is_inserted_where_every_iteration_is_touched_and_it_ends(self) -> None:
        played = run(Costs(stall_s=0.0, durable_s=0.95))
        played.play(500)
        measuring = played.told[Verdict.MEASURING]
        assert 4 * 5 <= measuring + 2 * 5 <= 6 * 8
        assert len(played.taken) > 400

    def test_validation_is_neither_clean_nor_charged_beyond_its_stall(self) -> None:
        played = run(Costs(stall_s=0.5))
        played.play(100)
        spent_s, before = played.tuner.overhead_s, played.tuner.profile()
        played.take(is_periodic=False)
        for _ in range(3):
            played.iterate(is_regular=False, extra_s=60.0)
        for _ in range(4):  # clean ones to compare it with
            played.iterate()
        assert played.tuner.overhead_s == pytest.approx(spent_s + 0.5)
        played.iterate(is_regular=False, extra_s=60.0)
        assert played.tuner.profile() == before


class TestBadSamples:
    @pytest.mark.parametrize(
        "bad",
        [
            Iteration(5.0, NAN),
            Iteration(0.0, 1.0, waited_s=1.0),
        ],
    )
    def test_a_bad_iteration_is_counted_and_changes_nothing_else(self, bad: Iteration) -> None:
        plain, disturbed = run(), run()
        plain.play(300)
        for _ in range(300):
            disturbed.play(1)
            disturbed.tuner.iteration(bad)
        assert disturbed.tuner.num_bad_samples == 300
        assert disturbed.taken == plain.taken
        assert disturbed.tuner.profile() == plain.tuner.profile()

    @pytest.mark.parametrize(
        ("copy_s", "waited_s"),
        [pytest.param(NAN, 0.0, id="bad times"), pytest.param(0.25, 30.0, id="the user waited")],
    )
    def test_a_checkpoint_is_charged_but_not_learned_with(
        self, copy_s: float, waited_s: float
    ) -> None:
        played = run()
        played.play(300)
        before, spent_s = played.tuner.profile(), played.tuner.overhead_s
        start_s, played.now_s = played.now_s, played.now_s + waited_s + 1.5
        played.tuner.started("odd", step=300, start_s=start_s, is_periodic=False)
        played.tuner.ended("odd", end_s=start_s + 0.5, measured=Measured(copy_s, 0.5, 0.75, 1000))
        played.tuner.iteration(Iteration(start_s, played.now_s, stall_s=0.5, waited_s=waited_s))
        for _ in range(2 + 4):
            played.iterate()
        assert played.tuner.num_bad_samples == int(math.isnan(copy_s))
        assert played.tuner.overhead_s == pytest.approx(spent_s + 0.5)
        assert played.tuner.profile() == before

    def test_a_checkpoint_with_a_bad_end_time_is_over_nevertheless(self) -> None:
        played = run(FREE)
        played.play(100)
        played.tuner.started("odd", step=100, start_s=played.now_s, is_periodic=True)
        played.tuner.ended("odd", end_s=INF, measured=FREE.measured)
        assert played.tuner.num_bad_samples == 1
        assert played.play(5)


class TestTimeliness:
    @pytest.mark.parametrize("lag", [1, 12])
    def test_iterations_reported_long_after_a_checkpoint_ended_are_charged_to_it(
        self, lag: int
    ) -> None:
        told = tuner()
        iterations = [Iteration(float(i), float(i + 1)) for i in range(12)]
        iterations += [Iteration(12.0, 13.5, stall_s=0.5)]
        iterations += [Iteration(i + 13.5, i + 14.5) for i in range(20)]
        for i in range(len(iterations) + lag):
            if i == 12:
                told.started("a", step=12, start_s=12.0, is_periodic=True)
            if i == 13:
                told.ended("a", end_s=12.75, measured=Costs().measured)
            if i >= lag:
                told.iteration(iterations[i - lag])
        assert told.overhead_s == pytest.approx(0.5)
        assert told.plan is not None
        assert told.plan.interval_steps == 10


class TestStatic:
    def test_the_first_plan_never_changes(self) -> None:
        played = run(Costs(stall_s=0.5), dynamic=False)
        played.play(100)
        first = played.tuner.plan
        played.costs = Costs(stall_s=9.0)
        steps = played.play(500)
        assert played.tuner.plan is first
        assert [*range(steps[0], 600, 10)] == steps
        assert played.told[Verdict.NO_BUDGET] == played.told[Verdict.MEASURING] == 0

    def test_a_wrong_cached_plan_is_replaced_once(self) -> None:
        cached = replace(CACHED, cost_s=50.0, cost_upper_s=60.0)
        played = run(Costs(stall_s=0.5), dynamic=False, cached=cached)
        played.play(2500)
        assert played.tuner.cache_rejected is not None
        assert interval(played) == 10


class TestTheCachedProfile:
    def test_a_new_run_does_not_wait_for_a_long_interval(self) -> None:
        played = run(Costs(stall_s=5.0), cached=replace(CACHED, cost_s=5.0, cost_upper_s=6.0))
        played.tuner.continue_from(0)
        assert interval(played) == 100
        assert played.play(40) == [3]

    def test_a_wrong_cached_iteration_time_is_found_at_ten_clean_iterations(self) -> None:
        played = run(cached=replace(CACHED, iteration_s=0.1, persist_s=0.05))
        played.step = 1000
        played.tuner.continue_from(1000)
        played.play(11)
        assert played.tuner.cache_rejected is None
        assert not played.tuner.is_measured
        played.play(1)
        assert played.tuner.cache_rejected == (
            "iteration_s is 1 here and 0.1 in the cached profile"
        )
        assert played.taken == [1012]
        played.play(100)
        assert interval(played) == 10

    def test_a_wrong_cached_cost_is_found_at_the_second_checkpoint(self) -> None:
        played = run(cached=replace(CACHED, cost_s=0.2))
        played.play(200)
        assert played.tuner.cache_rejected == "cost_s is 0.5 here and 0.2 in the cached profile"
        assert interval(played) == 10


class TestThePlace:
    def test_a_change_of_place_forgets_the_costs_of_the_other_place(self) -> None:
        played = run(Costs(stall_s=2.0, copy_s=2.5, durable_s=3.5))
        played.play(300)
        assert played.tuner.plan is not None
        assert (played.tuner.plan.place, interval(played)) == (SnapshotPlace.HOST, 40)
        played.tuner.free_device_bytes = 5000
        while played.tuner.plan.place is SnapshotPlace.HOST:
            played.play(1)
        played.costs = Costs(stall_s=0.1, copy_s=2.5, durable_s=3.5, device_copy_s=0.1)
        before = len(played.taken)
        while len(played.taken) < before + 2:
            played.play(1)
        profile = played.tuner.profile()
        assert profile is not None
        assert profile.place is SnapshotPlace.DEVICE
        assert profile.cost_s == pytest.approx(0.1)
        played.play(100)
        assert played.tuner.plan.place is SnapshotPlace.DEVICE


class TestManyRanks:
    def test_the_step_of_the_next_checkpoint_is_known_in_advance(self) -> None:
        played = run()
        assert played.tuner.next_due_step(0) == 1
        played.play(100)
        told = played.tuner.next_due_step(played.step)
        assert played.play(told - played.step - 1) == []
        assert played.play(2) in ([told], [told + 1])  # every fourth interval is a step longer

    @pytest.mark.parametrize("dynamic", [True, False])
    def test_higher_costs_on_a_different_rank_make_the_interval_longer(self, dynamic: bool) -> None:
        played = run(dynamic=dynamic)
        played.play(60)
        alone = interval(played)
        assert played.tuner.iteration_s == 1.0
        own = played.tuner.own_profile()
        assert own is not None
        played.tuner.set_cost_floor(
            {"cost_s": 4 * own.cost_s, "cost_upper_s": 4 * own.cost_upper_s}
        )
        played.play(100)
        assert interval(played) > 2 * alone
        assert played.tuner.next_due_step(played.step) - played.taken[-1] > 2 * alone
        assert played.tuner.profile() != played.tuner.own_profile()
