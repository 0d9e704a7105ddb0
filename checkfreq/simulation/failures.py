"""Failure processes, and published failure rates by size.

All processes are exponential: the expected time to the next failure is the same at any instant.
They differ in whether the clock runs during restarts, and in whether there is a warning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol

from checkfreq.errors import ConfigError

_DAY_S = 86_400.0


class Failures(Protocol):
    """How often a run fails, whether it can fail in restarts too, and the notice given."""

    @property
    def in_restarts(self) -> bool: ...

    @property
    def notice_s(self) -> float: ...

    def mean_s(self, restart_s: float) -> float:
        """Mean time to the next failure, from the last one or (not ``in_restarts``) its restart."""
        ...


@dataclass(frozen=True, slots=True)
class Never:
    """No failures."""

    in_restarts: ClassVar[bool] = False
    notice_s: ClassVar[float] = 0.0

    def mean_s(self, restart_s: float) -> float:
        """See Failures."""
        return math.inf


@dataclass(frozen=True, slots=True)
class Exponential:
    """Mean ``mtbf_s`` in wall-clock time, checkpoints and restarts included: the process of
    the closed form (policy/waste.py)."""

    mtbf_s: float
    in_restarts: ClassVar[bool] = True
    notice_s: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        _require("Exponential.mtbf_s", self.mtbf_s)

    def mean_s(self, restart_s: float) -> float:
        """See Failures."""
        return self.mtbf_s


@dataclass(frozen=True, slots=True)
class Interruptions:
    """A failure every ``every_s`` on average, recovery included, as clusters report it."""

    every_s: float
    in_restarts: ClassVar[bool] = False
    notice_s: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        _require("Interruptions.every_s", self.every_s)

    def mean_s(self, restart_s: float) -> float:
        """See Failures."""
        if not restart_s < self.every_s:
            raise ConfigError(
                f"Interruptions: a restart of {restart_s} s does not fit between interruptions "
                f"every {self.every_s} s"
            )
        return self.every_s - restart_s


@dataclass(frozen=True, slots=True)
class SpotPreemption:
    """Machines are taken away ``per_day`` times a day, with a notice of ``notice_s``.

    A run that is notified in time takes a last checkpoint, restarts on a different machine and
    loses only the time of the restart.
    """

    per_day: float
    notice_s: float = 0.0
    in_restarts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require("SpotPreemption.per_day", self.per_day)
        if not (math.isfinite(self.notice_s) and self.notice_s >= 0):
            raise ConfigError(
                f"SpotPreemption.notice_s: expected seconds >= 0, got {self.notice_s}"
            )

    def mean_s(self, restart_s: float) -> float:
        """See Failures."""
        return _DAY_S / self.per_day


class Rate(Enum):
    """Published failures per GPU and day. Time between failures falls as size grows.

    RESEARCH: 6.50 per 1,000 node-days of 8 GPUs (Kokolis et al., Revisiting reliability in
        large-scale machine learning research clusters, HPCA 2025); jobs of 1,024 GPUs were
        interrupted more often than that, every 7.9 h.
    PRETRAINING: 419 unexpected interruptions in 54 days at 16,384 GPUs (The Llama 3 herd of
        models, 2024).
    LARGEST: every 18 minutes at 100,000 GPUs (Training LLMs with fault tolerant HSDP on 100,000
        GPUs, 2026).
    SPOT: 127 preemptions in 24 h at 64 GPUs (the trace of PCcheck, ASPLOS 2025).
    """

    RESEARCH = 6.50 / (1_000 * 8)
    PRETRAINING = 419 / (54 * 16_384)
    LARGEST = 24 * 60 / 18 / 100_000
    SPOT = 127 / 64


@dataclass(frozen=True, slots=True)
class Cluster:
    """``num_gpus`` GPUs that fail at a published rate; any failure stops the run."""

    num_gpus: int
    rate: Rate = Rate.RESEARCH

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError(f"Cluster.num_gpus: expected at least 1, got {self.num_gpus}")

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of the whole cluster."""
        return _DAY_S / (self.num_gpus * self.rate.value)


def _require(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}: expected a finite number > 0, got {value}")
