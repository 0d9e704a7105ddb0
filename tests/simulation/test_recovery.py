"""Failures of processes, nodes and racks: what they take down, what is lost, where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from checkfreq.policy.waste import goodput
from checkfreq.simulation import Costs, FixedInterval
from checkfreq.simulation.domains import Domain
from checkfreq.simulation.recovery import Recovered, recover
from checkfreq.simulation.restarts import Restarts, Source, Storage
from checkfreq.simulation.sizes import mtbf_of

DAY_S = 86_400.0
COSTS = Costs(iteration_s=1.0, stall_s=1.0, copy_s=1.0, persist_s=20.0)
EVERY = 60
#: From one checkpoint to the next.
CYCLE_S = EVERY * COSTS.iteration_s + COSTS.cost_s


def recovered(
    per_day: Mapping[Domain, float],
    storage: Storage = Storage.SHARED,
    *,
    costs: Costs = COSTS,
    failures: int = 3000,
    **changed: Any,
) -> Recovered:
    given = {"state_bytes": 0, "fixed_s": 60.0, "num_gpus": 1024, **changed}
    return recover(
        costs,
        lambda _: FixedInterval(EVERY),
        per_day=per_day,
        restarts=Restarts(storage=storage, **given),
        wall_s=failures * mtbf_of(dict(per_day)),
        seed=0,
    )


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
    per_day = {domain: DAY_S / 1e5}
    found = recovered(per_day, storage, state_bytes=300, fixed_s=300.0, reading=reading)
    work = EVERY * COSTS.iteration_s / CYCLE_S
    assert {each for each in Source if found.returns[each].count} == {source}
    lost_each_s = found.returns[source].lost_s / found.returns[source].count
    assert lost_each_s == pytest.approx(work * (CYCLE_S / 2 + lag_s), rel=0.05)


@pytest.mark.parametrize("storage", Storage)
def test_every_second_is_counted_once(storage: Storage) -> None:
    per_day = dict.fromkeys(Domain, DAY_S / 2000.0)
    found = recovered(per_day, storage, state_bytes=10**12)
    outcome = found.outcome
    parts_s = (outcome.progress_s, outcome.overhead_s, outcome.lost_s, outcome.down_s)
    assert sum(parts_s) == pytest.approx(outcome.wall_s, rel=1e-9)
    assert min(parts_s) > 0
    returns = found.returns.values()
    assert sum(each.lost_s for each in returns) == pytest.approx(outcome.lost_s)
    assert sum(each.down_s for each in returns) == pytest.approx(outcome.down_s)
