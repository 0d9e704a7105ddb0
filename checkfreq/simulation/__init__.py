"""Simulates training runs: the effect of an interval, a bound or a failure rate. No torch.

``simulate`` runs the same objects that decide in a real run (policy/tuner.py, frequency.py), with
costs that are functions of time (costs.py) and with failures (failures.py). Its goodput agrees with
the closed form of policy/waste.py within 1 % (tests/test_simulate.py).
"""

from checkfreq.simulation.costs import (
    Costs,
    Noise,
    Rhythm,
    Trace,
    changing,
    smallest_interval,
    steady,
)
from checkfreq.simulation.deciders import FixedInterval
from checkfreq.simulation.failures import (
    Cluster,
    Exponential,
    Interruptions,
    Never,
    Rate,
    SpotPreemption,
)
from checkfreq.simulation.outcome import Outcome, Taken
from checkfreq.simulation.run import simulate

__all__ = [
    "Cluster",
    "Costs",
    "Exponential",
    "FixedInterval",
    "Interruptions",
    "Never",
    "Noise",
    "Outcome",
    "Rate",
    "Rhythm",
    "SpotPreemption",
    "Taken",
    "Trace",
    "changing",
    "simulate",
    "smallest_interval",
    "steady",
]
