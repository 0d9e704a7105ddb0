"""A training run on paper: what an interval, a bound or a failure rate leads to. No torch.

``simulate`` drives the very objects that decide in a real run (policy/tuner.py, frequency.py)
over costs that are functions of time (costs.py) and over failures (failures.py). It holds to the
closed form of policy/waste.py within 1 % (tests/test_simulate.py).
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
