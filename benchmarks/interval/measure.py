"""How close AUTO's interval comes to the ideal one where iterations vary, in simulated runs.

    python -m benchmarks.interval

Each run has ``--iterations``; its interval is the mean distance of the checkpoints in the second
half, and each plan from iteration 20 on, over the smallest interval that keeps the bound of 3.5 %.
Overhead is the true one, without the first checkpoint, over the bound. Arms: costs against the
iterations around each checkpoint (what AUTO does), and against the mean of all clean iterations.
``--first-seed`` gives other runs. No clock is read: the same seeds give the same numbers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks.interval.loads import BOUND, KINDS, LOADS
from benchmarks.lab.record import emit
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.tuner import RateTuner
from checkfreq.simulation import simulate

_SETTLED_AFTER = 20
ARMS = {"neighbours": True, "mean of all": False}


@dataclass(frozen=True, slots=True)
class Run:
    """Of one run: intervals over the ideal one, overhead over the bound, and when it began."""

    interval: float
    early: float
    longest_plan: float
    used: float
    first_step: int


def main() -> None:
    """Print a line for each class of loads and arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=6000)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with ProcessPoolExecutor(args.processes) as pool:
        for load in LOADS:
            for arm in ARMS:
                one = partial(simulated, load, arm, args.iterations)
                jobs = [(kind, seed) for kind in KINDS for seed in seeds]
                _report(load, arm, args, list(pool.map(one, jobs, chunksize=4)))


def simulated(load: str, arm: str, iterations: int, job: tuple[str, int]) -> Run:
    """One run of a kind of checkpoints and a seed."""
    kind, seed = job
    costs = KINDS[kind]
    end_s = iterations * costs.iteration_s
    given = LOADS[load](costs, seed, end_s)
    tuner = RateTuner(FrequencyPolicy(max_overhead=BOUND), paired=ARMS[arm])
    done = simulate(
        given.trace,
        lambda _: tuner,
        wall_s=end_s,
        noise=given.noise,
        rhythm=given.rhythm,
        seed=seed,
        max_overhead=BOUND,
    )
    steps = [taken.step for taken in done.taken]
    plans = [t.interval_steps for t in done.taken if t.interval_steps and t.step > _SETTLED_AFTER]
    return Run(
        interval=_distance(steps, done.num_iterations // 2, math.inf) / given.ideal_steps,
        early=_distance(steps, _SETTLED_AFTER, 300) / given.ideal_steps,
        longest_plan=max(plans, default=math.inf) / given.ideal_steps,
        used=(done.overhead_s - done.exempt_s) / done.progress_s / BOUND,
        first_step=steps[0],
    )


def _distance(steps: Sequence[int], start: float, end: float) -> float:
    """The mean distance of the checkpoints from ``start`` to ``end``; infinite if there is none."""
    inside = [step for step in steps if start <= step < end]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else math.inf


def _report(load: str, arm: str, args: argparse.Namespace, runs: list[Run]) -> None:
    def at(name: str) -> list[float | None]:
        """Median and 90th percentile; None: not finite."""
        values = sorted(getattr(run, name) for run in runs)
        found = (median(values), values[int(0.9 * (len(values) - 1))])
        return [round(value, 2) if math.isfinite(value) else None for value in found]

    emit(
        "interval",
        load=load,
        arm=arm,
        runs=len(runs),
        iterations=args.iterations,
        first_seed=args.first_seed,
        interval_over_ideal=at("interval"),
        early_over_ideal=at("early"),
        longest_plan_over_ideal=at("longest_plan"),
        overhead_over_bound=at("used"),
        part_above_bound=round(sum(run.used > 1.1 for run in runs) / len(runs), 4),
        first_step=at("first_step"),
    )
