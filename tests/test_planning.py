"""What ``checkfreq plan`` computes: its closed form agrees with the simulation."""

from __future__ import annotations

import pytest

from checkfreq.simulation import Costs, Exponential, FixedInterval, simulate, steady
from checkfreq.simulation.planning import Bounds, Checkpoint, Failing, outlook
from checkfreq.simulation.prices import Prices, bill


def checkpoint(costs: Costs, *, stall_s: float | None = None) -> Checkpoint:
    return Checkpoint(
        profile=costs.profile(), num_bytes=10**10, written_bytes=10**9, stall_s=stall_s
    )


@pytest.mark.parametrize(("mtbf_s", "persist_s"), [(3600.0, 10.0), (20_000.0, 60.0)])
def test_goodput_is_that_of_the_simulation(mtbf_s: float, persist_s: float) -> None:
    costs = Costs(iteration_s=1.0, stall_s=0.5, copy_s=0.5, persist_s=persist_s)
    plan = outlook(checkpoint(costs), Bounds(restart_s=60.0), Failing(mtbf_s=mtbf_s), num_gpus=1)
    simulated = simulate(
        steady(costs),
        lambda _: FixedInterval(plan.interval_steps),
        wall_s=3000 * mtbf_s,
        failures=Exponential(mtbf_s),
        restart_s=60.0,
    )
    assert plan.goodput == pytest.approx(simulated.goodput, rel=0.01)
    assert plan.overhead == pytest.approx(simulated.overhead, rel=0.01)


def test_a_month_on_s3_is_storage_requests_and_restores() -> None:
    costs = Costs(iteration_s=1.0, stall_s=1.0, persist_s=30.0)
    saved = checkpoint(costs)
    plan = outlook(saved, Bounds(), Failing(mtbf_s=86_400.0), num_gpus=1)
    prices = Prices(gb_month=0.02, thousand_writes=0.01, thousand_reads=0.0, gb_out=0.1)
    all_of_them = bill(saved, plan, prices, num_kept=3)
    assert all_of_them.storage == pytest.approx(3 * 10 * 0.02)
    assert all_of_them.restores == pytest.approx(30 * 10 * 0.1)
    assert all_of_them.uploads_per_day == plan.checkpoints_per_day
    hourly = bill(saved, plan, prices, num_kept=3, every_s=3600.0)
    assert hourly.uploads_per_day == 24
    assert hourly.writes == pytest.approx(30 * 24 * (120 + 3) / 1000 * 0.01)
