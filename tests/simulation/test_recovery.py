"""Failures of processes, nodes and racks: what they take down, what is lost, where it is read."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from checkfreq.policy.waste import goodput
from checkfreq.simulation import Cluster, Costs, FixedInterval, Outcome, Rate
from checkfreq.simulation.comparison import choices
from checkfreq.simulation.domains import Domain, Hierarchy, shares_of
from checkfreq.simulation.fitting import Fit, Point
from checkfreq.simulation.meeting import meeting, with_meetings, without_meetings
from checkfreq.simulation.rank_costs import RankCosts
from checkfreq.simulation.recovery import Recovered, recover
from checkfreq.simulation.restarts import Restarts, Source, Storage
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
def test_all_domains_together_fail_as_often_as_published(rate: Rate) -> None:
    num_gpus = 1024
    hierarchy = Hierarchy.published(rate.value, shares_of(rate))
    assert mtbf_of(hierarchy.at(num_gpus)) == pytest.approx(Cluster(num_gpus, rate).mtbf_s)


# Where a restart reads, and how long it takes


# What is lost


def test_without_memory_it_agrees_with_the_closed_form() -> None:
    mtbf_s = 2_000.0
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
