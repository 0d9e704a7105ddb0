"""Four classes of loads, each with several kinds of checkpoints, and their ideal intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from checkfreq.simulation.costs import (
    Costs,
    Noise,
    Rhythm,
    Trace,
    changing,
    smallest_interval,
    steady,
    unwaiting_interval,
)

BOUND = 0.035
#: Kinds of checkpoints: a device's copy; a copy on the host; one that touches nearly all
#: iterations at its ideal interval; one that takes ten iterations to become durable; long ones.
KINDS = {
    "device": Costs(iteration_s=0.2, stall_s=0.02, copy_s=0.05, persist_s=0.3, slowdown=0.02),
    "host": Costs(iteration_s=0.1, stall_s=0.02, copy_s=0.05, persist_s=0.3, slowdown=0.1),
    "dense": Costs(iteration_s=0.1, stall_s=0.005, copy_s=0.04, persist_s=0.14, slowdown=0.0571),
    "slow disk": Costs(iteration_s=0.1, stall_s=0.02, copy_s=0.05, persist_s=1.0, slowdown=0.04),
    "long": Costs(iteration_s=1.0, stall_s=0.3, copy_s=0.5, persist_s=5.0, slowdown=0.02),
}
_USUAL = Noise(0.01, 0.1)
#: Alternating networks, a short batch, gradient accumulation, a log line, a saved picture.
_RHYTHMS = (
    (),
    (1.05, 0.95),
    (1.0, 1.0, 1.0, 0.9),
    (0.7, 0.7, 0.7, 1.9),
    (*9 * [1.0], 1.3),
    (*49 * [1.0], 3.0),
)


@dataclass(frozen=True, slots=True)
class Load:
    """A trace of costs with its noise, and the smallest interval that keeps ``BOUND``."""

    trace: Trace
    noise: Noise
    rhythm: Rhythm
    ideal_steps: int


def quiet(costs: Costs, seed: int, end_s: float) -> Load:
    """Noise of 1 %."""
    return Load(steady(costs), _USUAL, Rhythm(), smallest_interval(costs, max_overhead=BOUND))


def noise(costs: Costs, seed: int, end_s: float) -> Load:
    """Independent noise of 15 %."""
    return replace(quiet(costs, seed, end_s), noise=Noise(0.15, 0.2))


def rhythm(costs: Costs, seed: int, end_s: float) -> Load:
    """Correlated noise of 5 or 15 %, and a rhythm of the loop."""
    factors = _RHYTHMS[seed % len(_RHYTHMS)]
    mean = replace(costs, iteration_s=costs.iteration_s * fmean(factors or (1.0,)))
    return Load(
        steady(costs),
        Noise(0.15 if seed % 2 else 0.05, 0.2, 0.8),
        Rhythm(factors),
        smallest_interval(mean, max_overhead=BOUND),
    )


def bursts(costs: Costs, seed: int, end_s: float) -> Load:
    """A second load comes and goes: iterations, and in half of the runs checkpoints, take longer.

    By 1.5 to 3 times, for 10 to 60 iterations of every 40 to 180, on average.
    """
    dice = Random(f"bursts {seed}")
    factor = dice.choice((1.5, 2.0, 3.0))
    slow = replace(costs, iteration_s=factor * costs.iteration_s)
    if dice.random() < 0.5:
        slow = replace(costs.times(factor), iteration_s=slow.iteration_s)
    mean_s = {
        id(slow): dice.choice((10, 30, 60)) * slow.iteration_s,
        id(costs): dice.choice((30, 60, 120)) * costs.iteration_s,
    }
    changes, spent_s, now_s, other = [(0.0, costs)], dict.fromkeys(mean_s, 0.0), 0.0, slow
    while True:
        current = changes[-1][1]
        lasts_s = dice.expovariate(1 / mean_s[id(current)])
        spent_s[id(current)] += min(lasts_s, end_s - now_s)
        now_s += lasts_s
        if now_s >= end_s:
            break
        changes.append((now_s, other))
        other = current
    iterations = [spent_s[id(each)] / each.iteration_s for each in (costs, slow)]
    part = iterations[1] / sum(iterations)
    cost_s = (1 - part) * costs.cost_s + part * slow.cost_s
    iteration_s = (1 - part) * costs.iteration_s + part * slow.iteration_s
    keeps_bound = math.ceil(cost_s / (BOUND * iteration_s))
    ideal = max(keeps_bound, unwaiting_interval(costs))
    return Load(changing(changes), Noise(0.05, 0.1), Rhythm(), ideal)


LOADS: dict[str, Callable[[Costs, int, float], Load]] = {
    "quiet": quiet,
    "15 % noise": noise,
    "correlated, rhythms": rhythm,
    "bursts": bursts,
}
