"""The simulator against the closed form and published figures, the tuner against an oracle.

    python -m benchmarks.simulate --seeds 10

Only the tuner's decisions are real; all times are simulated. For goodput by number of GPUs see
`benchmarks.goodput`.
"""

from __future__ import annotations

import argparse
from itertools import product
from statistics import fmean

from benchmarks.lab.record import emit
from checkfreq.policy.waste import goodput
from checkfreq.simulation import (
    Costs,
    Exponential,
    FixedInterval,
    Interruptions,
    simulate,
    steady,
)
from checkfreq.simulation.failures import Failures
from checkfreq.simulation.scenarios import Scenario, scenarios, settlings

_WORK_S, _COST_S = (30.0, 120.0, 600.0), (0.5, 5.0, 60.0)
_MTBF_S, _RESTART_S = (300.0, 1_800.0, 20_000.0), (0.0, 30.0, 300.0)


def main() -> None:
    """Print the result lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs of each scenario")
    parser.add_argument("--failures", type=int, default=20_000, help="at each point of the grid")
    args = parser.parse_args()
    _closed_form(args.failures)
    for stall_min, published in ((10, 0.44), (3, 0.80)):
        _anchor(stall_min, published, args.failures)
    for scenario in scenarios():
        _scenario(scenario, args.seeds)


def _closed_form(num_failures: int) -> None:
    grid = [
        (work_s, cost_s, mtbf_s, restart_s)
        for work_s, cost_s, mtbf_s, restart_s in product(_WORK_S, _COST_S, _MTBF_S, _RESTART_S)
        if work_s + cost_s <= mtbf_s  # beyond that there is hardly any progress
    ]
    errors = [_error(*point, num_failures=num_failures) for point in grid]
    emit(
        "simulate",
        arm="closed form",
        points=len(grid),
        failures=num_failures,
        largest_error=round(max(errors), 5),
        mean_error=round(fmean(errors), 5),
    )


def _error(
    work_s: float, cost_s: float, mtbf_s: float, restart_s: float, *, num_failures: int
) -> float:
    expected = goodput(work_s, cost_s=cost_s, mtbf_s=mtbf_s, restart_s=restart_s)
    # Enough of both, or the result is mostly chance.
    wall_s = num_failures * max(mtbf_s, 5 * work_s / expected)
    found = _fixed(cost_s, int(work_s), Exponential(mtbf_s), restart_s, wall_s)
    return abs(found / expected - 1)


def _anchor(stall_min: int, published: float, num_failures: int) -> None:
    every_s = 18 * 60.0
    found = _fixed(0.0, 1, Interruptions(every_s), stall_min * 60.0, num_failures * every_s)
    emit(
        "simulate",
        arm=f"{stall_min}-minute stall every 18 minutes",
        goodput=round(found, 4),
        expected=round(1 - stall_min / 18, 4),
        published=published,
    )


def _fixed(cost_s: float, steps: int, failures: Failures, restart_s: float, wall_s: float) -> float:
    trace = steady(Costs(iteration_s=1.0, stall_s=cost_s))
    return simulate(
        trace,
        lambda _: FixedInterval(steps),
        wall_s=wall_s,
        failures=failures,
        restart_s=restart_s,
        seed=int(wall_s + restart_s),
    ).goodput


def _scenario(scenario: Scenario, num_seeds: int) -> None:
    outcomes = [scenario.run(seed) for seed in range(num_seeds)]
    phases = zip(*(settlings(scenario, outcome) for outcome in outcomes), strict=True)
    settled = [
        {
            "oracle_steps": found[0].oracle_steps,
            "planned_steps": fmean(each.typical_steps for each in found),
            "actual_steps": round(fmean(each.actual_steps for each in found), 1),
            "checkpoints_until_close": _latest([each.num_checkpoints for each in found]),
        }
        for found in phases
    ]
    emit(
        "simulate",
        arm=scenario.name,
        seeds=num_seeds,
        max_overhead=scenario.max_overhead,
        largest_overhead=round(max(outcome.overhead for outcome in outcomes), 5),
        worst_excess_in_checkpoints=round(
            max((x.excess_s - x.exempt_s) / x.largest_cost_s for x in outcomes), 2
        ),
        phases=settled,
    )


def _latest(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None
