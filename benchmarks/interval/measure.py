"""How close AUTO's interval comes to the ideal one where iterations vary, in simulated runs.

    python -m benchmarks.interval

Each run has ``--iterations``; its interval is the mean distance of the checkpoints in the second
half, and each plan from iteration 20 on, over the smallest interval that keeps the bound of 3.5 %.
Overhead is the true one, without the first checkpoint, over the bound; in the worst 200 iterations
in a row, by how many of the dearest checkpoints it exceeds the bound. Arms: costs against the
iterations around each checkpoint (what AUTO does), and against the mean of all clean iterations.
Then, in runs of ``--cached-iterations``, cached profiles that are right and wrong (cached.py); they
are short, so there are more of them. ``--first-seed`` gives other runs. No clock is read: the same
seeds give the same numbers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from benchmarks.interval.cached import PROFILES, Watched, cached_profile
from benchmarks.interval.loads import BOUND, KINDS, LOADS
from benchmarks.lab.record import emit
from checkfreq.policy.budget import DEPTH
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.simulation import simulate

_POLICY = FrequencyPolicy(max_overhead=BOUND)
_SETTLED_AFTER = 20
ARMS = {"neighbours": True, "mean of all": False}
CACHED_LOADS = ("quiet", "15 % noise")


@dataclass(frozen=True, slots=True)
class Run:
    """Of one run: intervals over the ideal one, overhead over the bound, and when it began.

    window: by how many of its dearest checkpoints the worst 200 iterations exceed the bound.
    slack: by how many they may: what the bucket ever held, and the one that was under way.
    discarded: after how many iterations a cached profile was; infinite if it never was.
    """

    interval: float
    early: float
    longest_plan: float
    used: float
    window: float
    slack: float
    first_step: int
    discarded: float


def main() -> None:
    """Print a line for each class of loads and arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=6000)
    parser.add_argument("--cached-seeds", type=int, default=96)
    parser.add_argument("--cached-iterations", type=int, default=300)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    with ProcessPoolExecutor(args.processes) as pool:
        for load, arm in product(LOADS, ARMS):
            one = partial(simulated, load, arm, args.iterations)
            runs = list(pool.map(one, _jobs(args.first_seed, args.seeds), chunksize=4))
            _report(load, args, runs, arm=arm, iterations=args.iterations)
        for load, profile in product(CACHED_LOADS, PROFILES):
            one = partial(began_with, load, profile, args.cached_iterations)
            runs = list(pool.map(one, _jobs(args.first_seed, args.cached_seeds), chunksize=4))
            _report(load, args, runs, profile=profile, iterations=args.cached_iterations)


def _jobs(first_seed: int, num_seeds: int) -> list[tuple[str, int]]:
    seeds = range(first_seed, first_seed + num_seeds)
    return [(kind, seed) for kind in KINDS for seed in seeds]


def simulated(load: str, arm: str, iterations: int, job: tuple[str, int]) -> Run:
    """One run of a kind of checkpoints and a seed."""
    return _run(load, iterations, job, Watched(_POLICY, paired=ARMS[arm]))


def began_with(load: str, profile: str, iterations: int, job: tuple[str, int]) -> Run:
    """The same with a cached profile, one of ``PROFILES``."""
    tuner = Watched(_POLICY, cached=cached_profile(profile, KINDS[job[0]]))
    return _run(load, iterations, job, tuner)


def _run(load: str, iterations: int, job: tuple[str, int], tuner: Watched) -> Run:
    kind, seed = job
    costs = KINDS[kind]
    end_s = iterations * costs.iteration_s
    given = LOADS[load](costs, seed, end_s)
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
        window=done.window_excess_s / done.largest_cost_s,
        slack=DEPTH * tuner.planned_s / done.largest_cost_s + 1,
        first_step=steps[0],
        discarded=tuner.discarded_at,
    )


def _distance(steps: Sequence[int], start: float, end: float) -> float:
    """The mean distance of the checkpoints from ``start`` to ``end``; infinite if there is none."""
    inside = [step for step in steps if start <= step < end]
    return (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else math.inf


def _report(load: str, args: argparse.Namespace, runs: list[Run], **setting: Any) -> None:
    def at(name: str) -> list[float | None]:
        """Median and 90th percentile; None: not finite."""
        values = sorted(getattr(run, name) for run in runs)
        found = (median(values), values[int(0.9 * (len(values) - 1))])
        return [round(value, 2) if math.isfinite(value) else None for value in found]

    emit(
        "interval",
        load=load,
        **setting,
        runs=len(runs),
        first_seed=args.first_seed,
        interval_over_ideal=at("interval"),
        early_over_ideal=at("early"),
        longest_plan_over_ideal=at("longest_plan"),
        overhead_over_bound=at("used"),
        part_above_bound=round(sum(run.used > 1.1 for run in runs) / len(runs), 4),
        window_over_bound=at("window"),
        part_windows_above=round(sum(run.window > run.slack for run in runs) / len(runs), 4),
        first_step=at("first_step"),
        discarded_after=at("discarded"),
    )
