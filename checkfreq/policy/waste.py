"""Waste, the time lost to checkpoints and failures: optimal intervals in closed form. Pure.

Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.
Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3),
2006. All times are in seconds; times between failures are exponential with mean ``mtbf_s``.
"""

from __future__ import annotations

import math

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import is_amount


def young_interval_s(cost_s: float, *, mtbf_s: float) -> float:
    """Young's optimum: seconds of work between checkpoints that cost ``cost_s`` each."""
    _require(cost_s=cost_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_interval_s(cost_s: float, *, mtbf_s: float) -> float:
    """Daly's optimum: seconds of work between checkpoints; ``mtbf_s`` if one costs over 2 M.

    The time until a checkpoint is durable does not move the optimum, since every failure loses
    it whatever the interval is.
    """
    _require(cost_s=cost_s, mtbf_s=mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    half = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - cost_s


def goodput(interval_s: float, *, cost_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """The fraction of all time that ends up as progress; exact for blocking checkpoints.

    ``interval_s`` is the work between checkpoints. Failures may also strike during a checkpoint
    or a restart.
    """
    _require(cost_s=cost_s, mtbf_s=mtbf_s, restart_s=restart_s)
    if not (is_amount(interval_s) and interval_s > 0):
        raise ConfigError(f"interval_s: expected finite seconds > 0, got {interval_s}")
    segment = (interval_s + cost_s) / mtbf_s
    # tau / (M e^(R/M) (e^segment - 1)), with negative exponents, which cannot overflow.
    survival = math.exp(-segment - restart_s / mtbf_s) / -math.expm1(-segment)
    return interval_s / mtbf_s * survival


def _require(*, mtbf_s: float, **amounts_s: float) -> None:
    if not (is_amount(mtbf_s) and mtbf_s > 0):
        raise ConfigError(f"mtbf_s: expected finite seconds > 0, got {mtbf_s}")
    for name, value in amounts_s.items():
        if not is_amount(value):
            raise ConfigError(f"{name}: expected finite seconds >= 0, got {value}")
