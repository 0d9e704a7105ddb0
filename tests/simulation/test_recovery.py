"""Failures of processes, nodes and racks: what they take down, what is lost, where it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from checkfreq.errors import ConfigError
from checkfreq.policy.waste import goodput
from checkfreq.simulation import Cluster, Costs, FixedInterval, Outcome, Rate
from checkfreq.simulation.comparison import choices
from checkfreq.simulation.domains import PUBLISHED, Domain, Hierarchy, shares_of
from checkfreq.simulation.fitting import Fit, Point
from checkfreq.simulation.meeting import meeting, with_meetings, without_meetings
from checkfreq.simulation.rank_costs import RankCosts
from checkfreq.simulation.recovery import Recovered, recover
from checkfreq.simulation.restarts import Kept, Restarts, Source, Storage, Way
from checkfreq.simulation.sizes import AtSize, at_size, compare_recoveries, mtbf_of

DAY_S = 86_400.0
COSTS = Costs(iteration_s=1.0, stall_s=1.0, copy_s=1.0, persist_s=20.0)
EVERY = 60
#: From one checkpoint to the next.
CYCLE_S = EVERY * COSTS.iteration_s + COSTS.cost_s


def restarts(storage: Storage = Storage.SHARED, **changed: object) -> Restarts:
    given: dict[str, object] = {
        "storage": storage,
        "state_bytes": 0,
        "fixed_s": 60.0,
        "num_gpus": 1024,
        **changed,
    }
    return Restarts(**given)  # type: ignore[arg-type]


def recovered(
    per_day: Mapping[Domain, float],
    how: Restarts | None = None,
    *,
    costs: Costs = COSTS,
    failures: int = 3000,
    seed: int = 0,
) -> Recovered:
    return recover(
        costs,
        lambda _: FixedInterval(EVERY),
        per_day=per_day,
        restarts=how or restarts(),
        wall_s=failures * mtbf_of(dict(per_day)),
        seed=seed,
    )


def lost_each_s(found: Recovered, source: Source) -> float:
    return found.returns[source].lost_s / found.returns[source].count


# How often things fail


@pytest.mark.parametrize("rate", Rate)
@pytest.mark.parametrize("num_gpus", [8, 16, 1024, 100_000])
def test_all_domains_together_fail_as_often_as_published(rate: Rate, num_gpus: int) -> None:
    hierarchy = Hierarchy.published(rate.value, shares_of(rate))
    assert mtbf_of(hierarchy.at(num_gpus)) == pytest.approx(Cluster(num_gpus, rate).mtbf_s)


def test_rates_are_those_of_one_process_node_and_rack() -> None:
    per_day = dict.fromkeys(Domain, 0.5)
    hierarchy = Hierarchy(per_day=per_day, gpus_per_node=4, nodes_per_rack=18)
    assert hierarchy.at(144) == {
        Domain.PROCESS: 0.5 * 144,
        Domain.REBOOT: 0.5 * 36,
        Domain.NODE: 0.5 * 36,
        Domain.RACK: 0.5 * 2,
    }


def test_a_given_rate_takes_the_place_of_the_published_one() -> None:
    hierarchy = Hierarchy.published(1e-3).with_rates({Domain.RACK: 0.0, Domain.NODE: 0.25})
    per_day = hierarchy.at(8)
    assert Domain.RACK not in per_day
    assert per_day[Domain.NODE] == 0.25
    assert per_day[Domain.PROCESS] == pytest.approx(8e-3 * PUBLISHED[Domain.PROCESS])


def test_spot_machines_do_not_come_back() -> None:
    assert shares_of(Rate.SPOT) == {Domain.NODE: 1.0}
    assert sum(PUBLISHED.values()) == pytest.approx(1.0)


# Where a restart reads, and how long it takes


@pytest.mark.parametrize(
    ("storage", "fixed_s", "domain", "kept", "source"),
    [
        (Storage.SHARED, 60.0, Domain.PROCESS, Kept.COPIED, Source.MEMORY),
        (Storage.SHARED, 60.0, Domain.REBOOT, Kept.DURABLE, Source.SHARED),
        (Storage.SHARED, 60.0, Domain.NODE, Kept.DURABLE, Source.SHARED),
        (Storage.SHARED, 60.0, Domain.RACK, Kept.DURABLE, Source.SHARED),
        (Storage.OWN, 60.0, Domain.PROCESS, Kept.COPIED, Source.MEMORY),
        (Storage.OWN, 60.0, Domain.REBOOT, Kept.DURABLE, Source.LOCAL),
        (Storage.OWN, 60.0, Domain.NODE, Kept.MIRRORED, Source.SHARED),
        (Storage.OWN, 60.0, Domain.RACK, Kept.MIRRORED, Source.SHARED),
        # The memory has been given back, but its worker has written what it held.
        (Storage.SHARED, 301.0, Domain.PROCESS, Kept.COPIED, Source.SHARED),
        (Storage.OWN, 301.0, Domain.PROCESS, Kept.COPIED, Source.LOCAL),
    ],
)
def test_what_a_failure_leaves_and_where_it_is_read(
    storage: Storage, fixed_s: float, domain: Domain, kept: Kept, source: Source
) -> None:
    assert restarts(storage, fixed_s=fixed_s).way(domain) == Way(kept, source)


@pytest.mark.parametrize(
    ("source", "reading_s"), [(Source.MEMORY, 1.0), (Source.LOCAL, 4.0), (Source.SHARED, 32.0)]
)
def test_a_restart_takes_its_bytes_over_the_bandwidth_and_the_rest(
    source: Source, reading_s: float
) -> None:
    how = restarts(
        state_bytes=3200,
        num_gpus=32,
        gpus_per_node=8,
        fixed_s=60.0,
        planning_s=5.0,
        reading={Source.MEMORY: 100.0, Source.LOCAL: 200.0, Source.SHARED: 100.0},
    )
    assert how.seconds(source) == 65.0 + reading_s


def test_copies_elsewhere_are_made_only_of_what_is_on_nodes() -> None:
    reading = {Source.MEMORY: 1.0, Source.LOCAL: 1.0, Source.SHARED: 10.0}
    assert restarts(Storage.OWN, state_bytes=100, reading=reading).mirror_s == 10.0
    assert restarts(Storage.SHARED, state_bytes=100, reading=reading).mirror_s == 0.0


# What is lost


@pytest.mark.parametrize("mtbf_s", [2_000.0, 20_000.0])
def test_without_memory_it_agrees_with_the_closed_form(mtbf_s: float) -> None:
    blocking = Costs(iteration_s=1.0, stall_s=5.0)
    found = recovered({Domain.NODE: DAY_S / mtbf_s}, costs=blocking, failures=20_000)
    expected = goodput(EVERY, cost_s=5.0, mtbf_s=mtbf_s, restart_s=60.0)
    assert found.outcome.goodput == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("domain", "source", "storage", "lag_s"),
    [
        (Domain.PROCESS, Source.MEMORY, Storage.SHARED, COSTS.copy_s),
        (Domain.NODE, Source.SHARED, Storage.SHARED, COSTS.durable_s),
        (Domain.REBOOT, Source.LOCAL, Storage.OWN, COSTS.durable_s),
        (Domain.RACK, Source.SHARED, Storage.OWN, COSTS.durable_s + 30.0),
    ],
)
def test_a_failure_loses_half_an_interval_and_what_was_not_kept_yet(
    domain: Domain, source: Source, storage: Storage, lag_s: float
) -> None:
    reading = {Source.MEMORY: 1e9, Source.LOCAL: 1e9, Source.SHARED: 10.0}
    how = restarts(storage, state_bytes=300, fixed_s=300.0, reading=reading)
    found = recovered({domain: DAY_S / 1e5}, how)
    work = EVERY * COSTS.iteration_s / CYCLE_S
    assert {each for each in Source if found.returns[each].count} == {source}
    assert lost_each_s(found, source) == pytest.approx(work * (CYCLE_S / 2 + lag_s), rel=0.05)


def test_copies_that_take_longer_than_an_interval_follow_one_another() -> None:
    reading = {Source.MEMORY: 1e9, Source.LOCAL: 1e9, Source.SHARED: 1.0}
    copy_s = 10 * CYCLE_S
    how = restarts(Storage.OWN, state_bytes=round(copy_s), fixed_s=0.0, reading=reading)
    found = recovered({Domain.NODE: DAY_S / 1e6}, how)
    # One was made when the copy began, and the copy that is under way counts for nothing.
    lag_s = COSTS.durable_s + CYCLE_S / 2 + 1.5 * copy_s
    work = EVERY * COSTS.iteration_s / CYCLE_S
    assert lost_each_s(found, Source.SHARED) == pytest.approx(work * lag_s, rel=0.05)


@pytest.mark.parametrize("storage", Storage)
def test_every_second_is_counted_once(storage: Storage) -> None:
    per_day = dict.fromkeys(Domain, DAY_S / 2000.0)
    found = recovered(per_day, restarts(storage, state_bytes=10**12))
    outcome = found.outcome
    parts_s = (outcome.progress_s, outcome.overhead_s, outcome.lost_s, outcome.down_s)
    assert sum(parts_s) == pytest.approx(outcome.wall_s, rel=1e-9)
    assert min(parts_s) > 0
    returns = found.returns.values()
    assert sum(each.lost_s for each in returns) == pytest.approx(outcome.lost_s)
    assert sum(each.down_s for each in returns) == pytest.approx(outcome.down_s)


def test_a_failure_in_a_restart_takes_the_memory_down_too() -> None:
    per_day = {Domain.PROCESS: DAY_S / 1000.0, Domain.NODE: DAY_S / 1000.0}
    quick = recovered(per_day, restarts(fixed_s=0.0))
    slow = recovered(per_day, restarts(fixed_s=300.0))

    def part(found: Recovered) -> float:
        counts = {source: each.count for source, each in found.returns.items()}
        return counts[Source.MEMORY] / sum(counts.values())

    assert part(quick) == pytest.approx(0.5, abs=0.05)
    assert part(slow) < part(quick) - 0.05
    assert sum(each.count for each in slow.returns.values()) < sum(slow.failures.values())


def test_a_snapshot_in_memory_is_waited_for_until_it_is_committed() -> None:
    costs = Costs(iteration_s=1.0, stall_s=1.0, copy_s=1.0, persist_s=50.0)
    per_day = {Domain.PROCESS: DAY_S / 1e5}
    found = recovered(per_day, restarts(fixed_s=0.0), costs=costs)
    returns = found.returns[Source.MEMORY]
    # Of each cycle, 50 s of persisting are left to wait for, 25 s on average.
    assert returns.down_s / returns.count == pytest.approx(50 / CYCLE_S * 25, rel=0.1)
    covered = recovered(per_day, restarts(fixed_s=51.0), costs=costs).returns[Source.MEMORY]
    assert covered.down_s / covered.count == pytest.approx(51.0, rel=1e-3)


def test_a_checkpoint_restored_from_memory_is_not_elsewhere_yet() -> None:
    """A node that fails before it was copied takes the run back further, work of two starts."""
    reading = {Source.MEMORY: 1e9, Source.LOCAL: 1e9, Source.SHARED: 1.0}
    per_day = {Domain.PROCESS: DAY_S / 500.0, Domain.NODE: DAY_S / 20_000.0}
    kept_s = {}
    for copy_s in (1, 2000):
        how = restarts(Storage.OWN, state_bytes=copy_s, fixed_s=0.0, reading=reading)
        kept_s[copy_s] = lost_each_s(recovered(per_day, how, failures=20_000), Source.SHARED)
    assert kept_s[2000] > 1000 > CYCLE_S > kept_s[1]


def test_the_same_seed_gives_every_decider_the_same_failures() -> None:
    per_day = dict.fromkeys(Domain, DAY_S / 2000.0)
    size = at_size(COSTS, 1024)
    arms = list(
        compare_recoveries(
            size, hierarchy=Hierarchy(per_day=per_day), restarts=restarts(), days=0.1, seed=3
        )
    )
    assert len({tuple(each.recovered.failures.items()) for each in arms}) == 1
    assert len({each.arm.name for each in arms}) == len(arms)
    again = recovered(per_day, seed=1).outcome
    assert again == recovered(per_day, seed=1).outcome != recovered(per_day, seed=2).outcome


# What ranks add


def meeting_of(seconds: float) -> RankCosts:
    return RankCosts({"meeting": Fit(seconds, 0.0, 0.0, (Point(2, seconds),))})


def test_meetings_are_overhead_and_no_work() -> None:
    size = at_size(COSTS, 2, rank_costs=meeting_of(1.0))
    assert size.boundary_s == pytest.approx(1 / 58)
    fixed = ran("fixed", size, days=0.5)
    parts_s = (fixed.progress_s, fixed.overhead_s, fixed.lost_s, fixed.down_s)
    assert sum(parts_s) == pytest.approx(fixed.wall_s)
    assert fixed.overhead == pytest.approx(1 / 58 + 1 / 600, rel=0.01)


def test_auto_takes_meetings_off_its_budget() -> None:
    size = at_size(COSTS, 2, rank_costs=meeting_of(0.05))
    assert ran("auto", size, days=0.2).overhead == pytest.approx(0.035, rel=0.03)
    assert ran("bound", size, days=0.2).overhead > 0.04  # knows nothing of meetings


def test_where_meetings_use_up_the_bound_auto_spends_half_of_it_on_checkpoints() -> None:
    size = at_size(COSTS, 2, rank_costs=meeting_of(5.0))
    assert size.meetings > 0.035
    found = ran("auto", size, days=0.2)
    assert found.overhead - size.meetings == pytest.approx(0.035 / 2, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("iteration_s", "cost_s"), [(1.0, 1.0), (0.125, 0.008)])
def test_the_same_holds_beyond_what_is_stepped_through(iteration_s: float, cost_s: float) -> None:
    costs = Costs(iteration_s=iteration_s, stall_s=cost_s, copy_s=cost_s, persist_s=0.05)
    size = at_size(costs, 2, rank_costs=meeting_of(5.0))
    found = ran("auto", size, days=1000)
    assert found.overhead - size.meetings == pytest.approx(0.035 / 2, rel=0.03)


def ran(name: str, size: AtSize, *, days: float) -> Outcome:
    """One arm, in a run that is too short for its failures."""
    found = choices(size.costs, mtbf_s=1e12, max_overhead=0.035, interval_s=600.0)
    (new_decider,) = [decider for arm, decider, _ in found if arm == name]
    outcome = recover(
        with_meetings(size.costs, size.boundary_s),
        meeting(new_decider, size.boundary_s),
        per_day={Domain.NODE: DAY_S / 1e12},
        restarts=restarts(),
        wall_s=days * DAY_S,
    ).outcome
    return without_meetings(outcome, size.costs, size.boundary_s)


def test_commits_and_restores_grow_with_the_ranks() -> None:
    costs = RankCosts(
        {
            "commit": Fit(0.0, 0.0, 1e-3, (Point(2, 2e-3),)),
            "restore": Fit(0.0, 0.0, 2e-3, (Point(2, 4e-3),)),
        }
    )
    size = at_size(COSTS, 10_000, rank_costs=costs)
    assert size.costs.persist_s == COSTS.persist_s + 10
    assert (size.commit_s, size.planning_s, size.boundary_s) == (10, 20, 0)
    alone = at_size(COSTS, 1, rank_costs=costs)
    assert (alone.costs, alone.planning_s) == (COSTS, 0)


# What is refused


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Hierarchy(per_day={Domain.NODE: -1.0}), "failures of a node"),
        (lambda: Hierarchy(per_day={Domain.NODE: math.nan}), "failures of a node"),
        (lambda: Hierarchy(per_day={}, gpus_per_node=0), "gpus_per_node"),
        (lambda: Hierarchy(per_day={}, nodes_per_rack=0), "nodes_per_rack"),
        (lambda: Hierarchy(per_day={}).at(8), "one above 0"),
        (lambda: Hierarchy.published(1.0).at(0), "num_gpus"),
        (lambda: restarts(state_bytes=-1), "state_bytes"),
        (lambda: restarts(fixed_s=math.inf), "fixed_s"),
        (lambda: restarts(reading={Source.MEMORY: 1.0, Source.LOCAL: 1.0}), "from shared"),
        (lambda: restarts(reading=dict.fromkeys(Source, 0.0)), "from memory"),
        (lambda: recovered({Domain.NODE: 1.0}, failures=0), "wall_s"),
        (lambda: recovered({Domain.NODE: 1e6}, failures=300_000), "failures: simulate a shorter"),
        (
            lambda: recovered(
                {Domain.NODE: 1.0},
                costs=Costs(iteration_s=1.0, stall_s=0.0, copy_s=50.0, persist_s=50.0),
            ),
            "do not overlap",
        ),
    ],
)
def test_bad_input_is_refused_by_name(make, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=said):
        make()
