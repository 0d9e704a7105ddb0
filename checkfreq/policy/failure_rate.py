"""How often runs fail, learned from how they ended, and how well that is known. Pure.

Failures are a Poisson process: n of them in a running time of t seconds. The mean time between
failures is t / n, and its limits are exact (Garwood, Biometrika 28, 1936), from the quantiles q of
the chi-square distribution::

    2 t / q(1 - a / 2, 2 n + 2)   to   2 t / q(a / 2, 2 n),     confidence 1 - a

Without a failure the upper limit is infinite. Only time in which runs trained counts, and only ends
that nobody asked for: who counts is pacing/profile_cache.py, and story/failing.py from events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from checkfreq.policy.profile import is_amount

#: Of the limits that are shown.
CONFIDENCE = 0.9
#: The mean of fewer is known too poorly to plan with: the limits of two are a factor of 18 apart,
#: those of three 9. The best interval grows with the root of the mean, and waste is flat around it.
LEAST_FAILURES = 3
#: A shorter run is not counted, neither its failure nor its time: it failed in its script.
LEAST_RUN_S = 60.0
#: Up to so many degrees of freedom quantiles are exact; beyond, an approximation (Wilson and
#: Hilferty, PNAS 17, 1931) is better than 1e-6.
_EXACT_DEGREES = 1000
_BISECTIONS = 80


@dataclass(frozen=True, slots=True)
class FailureRate:
    """``failures`` in ``running_s`` seconds of training."""

    failures: int = 0
    running_s: float = 0.0

    @property
    def mean_s(self) -> float | None:
        """Running time per failure; None before the first one."""
        if not self.failures or not 0 < self.running_s < math.inf:
            return None
        return self.running_s / self.failures

    @property
    def mtbf_s(self) -> float | None:
        """The same once there are enough to plan with."""
        return self.mean_s if self.failures >= LEAST_FAILURES else None

    def limits_s(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """The limits of the mean time between failures; without a failure the upper is infinite."""
        part = (1 - confidence) / 2
        twice_s = 2 * self.running_s
        low_s = twice_s / chi_square_quantile(1 - part, 2 * self.failures + 2)
        if not self.failures:
            return low_s, math.inf
        return low_s, twice_s / chi_square_quantile(part, 2 * self.failures)

    def more_than(self, other: FailureRate) -> bool:
        """Whether it was learned from more running time."""
        return self.running_s > other.running_s

    def facts(self) -> dict[str, float | int | None]:
        """For ``stats()``, events and reports; nothing known is None."""
        mean_s = self.mean_s
        low_s, high_s = (None, None) if mean_s is None else self.limits_s()
        return {
            "failures_seen": self.failures or None,
            "mtbf_seen_s": mean_s,
            "mtbf_seen_low_s": low_s,
            "mtbf_seen_high_s": high_s,
        }

    def explain(self) -> str:
        """For people: ``4 times in 12.0 h of training: every 3.0 h (90 % confidence: ...)``."""
        times = {0: "never", 1: "once"}.get(self.failures, f"{self.failures} times")
        said = f"{times} in {_span(self.running_s)} of training"
        if self.mean_s is None:
            return said
        low_s, high_s = self.limits_s()
        return (
            f"{said}: every {_span(self.mean_s)} ({100 * CONFIDENCE:.0f} % confidence: "
            f"{_span(low_s)} to {_span(high_s)})"
        )


def rate_from(failures: object, running_s: object) -> FailureRate | None:
    """The rate if both are numbers that can have been counted; None otherwise."""
    if type(failures) is int and 0 <= failures < 1 << 40 and is_amount(running_s):
        return FailureRate(failures, float(running_s))  # type: ignore[arg-type]
    return None


def chi_square_quantile(part: float, degrees: int) -> float:
    """Where the chi-square distribution function is ``part``, for an even number of ``degrees``.

    With 2 m degrees the function is 1 minus the chance of fewer than m events of a Poisson process,
    a finite sum, which is bisected.
    """
    assert degrees > 0, degrees
    assert degrees % 2 == 0, degrees
    near = _wilson_hilferty(part, degrees)
    if degrees > _EXACT_DEGREES:
        return near
    low, high = 0.0, 2 * near + 4.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _below(middle / 2, degrees // 2) < part else (low, middle)
    return high


def _below(mean: float, num: int) -> float:
    """The chance of ``num`` events or more where ``mean`` are expected."""
    terms = (math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(num))
    return 1 - math.fsum(terms)


def _wilson_hilferty(part: float, degrees: int) -> float:
    spread = 2 / (9 * degrees)
    root = 1 - spread + NormalDist().inv_cdf(part) * math.sqrt(spread)
    return float(degrees * max(0.0, root) ** 3)


def _span(seconds: float) -> str:
    """``40 s``, ``4.2 min``, ``3.1 h``, ``2.5 d``."""
    for unit, least_s, size in (
        ("d", 172_800.0, 86_400.0),
        ("h", 3600.0, 3600.0),
        ("min", 60.0, 60.0),
    ):
        if seconds >= least_s:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
