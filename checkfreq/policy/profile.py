"""The measured costs of a run, from which the interval is chosen. Pure.

Symbols are those of the CheckFreq paper and of ARCHITECTURE.md, section Policy.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from checkfreq.errors import ConfigError
from checkfreq.types import SnapshotPlace

_LARGEST = sys.float_info.max
#: Thirty years: a longer time cannot have been measured, and sums of it could overflow.
LONGEST_S = 1e9
#: Stands for an iteration so short that its time is lost in the noise of measuring it.
SHORTEST_S = 1e-9

#: An interval is planned so that, by the error of its cost alone, it breaks the bound by more than
#: a tenth in one case of 40; but with at most 1.75 times the mean, since few costs say little, and
#: the budget holds checkpoints back that turn out to be dearer. Simulated (benchmarks.interval,
#: 2026-11): without that limit the first 300 iterations have intervals 1.9 times as long as the
#: ideal, with it 1.5; at a limit of 1.3, a tenth of the runs break the bound.
_ONE_IN_40 = 1.96
_TOLERATED = 1.1
_MOST_CAREFUL = 1.75

#: Costs that ranks share: the highest of any rank counts, since all wait for the slowest.
SHARED_COSTS = ("host_copy_s", "persist_s", "durable_s", "cost_s", "cost_error_s", "cost_upper_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured costs of one training run. Seconds and bytes.

    iteration_s (T): an iteration without checkpoint activity.
    overlap_s (W): from a boundary to the next weight update; a copy can hide behind it.
    host_copy_s (D): the snapshot's copy to host memory.
    device_copy_s (G): the copy within the device; None if none was taken.
    persist_s (P): a complete snapshot becoming durable.
    durable_s (L): from the boundary until the checkpoint is durable.
    cost_s (o): what one checkpoint adds to the training time, slowdown included.
    cost_error_s: the standard error of ``cost_s`` due to noise, that of T included.
    cost_upper_s: an upper confidence limit of ``cost_s``, at least ``cost_s``.
    boundary_s (b): what each boundary costs, checkpoint or not.
    place: where the snapshots behind ``cost_s`` were taken.
    state_bytes (S): bytes of one snapshot.

    Raises ConfigError for a number that is not finite or is negative, and for a T of 0.
    """

    iteration_s: float
    overlap_s: float
    host_copy_s: float
    persist_s: float
    durable_s: float
    cost_s: float
    cost_upper_s: float
    state_bytes: int
    device_copy_s: float | None = None
    boundary_s: float = 0.0
    cost_error_s: float = 0.0
    place: SnapshotPlace = SnapshotPlace.HOST

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "place" or (field.name == "device_copy_s" and value is None):
                continue
            if not is_amount(value):
                raise ConfigError(
                    f"Profile.{field.name}: expected a finite number >= 0, got {value!r}"
                )
        if not self.iteration_s > 0:
            raise ConfigError(
                f"Profile.iteration_s: expected more than 0 s, got {self.iteration_s}"
            )
        if self.cost_upper_s < self.cost_s:
            raise ConfigError(
                f"Profile.cost_upper_s: expected at least cost_s = {self.cost_s}, "
                f"got {self.cost_upper_s}"
            )

    @property
    def planned_cost_s(self) -> float:
        """The cost that the interval is planned with: seldom much less than o."""
        careful_s = (self.cost_s + _ONE_IN_40 * self.cost_error_s) / _TOLERATED
        return max(self.cost_s, min(careful_s, _MOST_CAREFUL * self.cost_s))

    def with_costs_scaled(self, factor: float) -> Profile:
        """The same run if checkpoints cost ``factor`` times as much."""
        return replace(
            self,
            cost_s=self.cost_s * factor,
            cost_error_s=self.cost_error_s * factor,
            cost_upper_s=self.cost_upper_s * factor,
            persist_s=self.persist_s * factor,
            host_copy_s=self.host_copy_s * factor,
        )

    def at_least(self, costs: Mapping[str, float]) -> Profile:
        """With ``SHARED_COSTS`` raised to their values in ``costs`` (by name) where higher."""
        higher: dict[str, Any] = {
            name: costs[name] for name in SHARED_COSTS if costs.get(name, 0.0) > self._known(name)
        }
        return replace(self, **higher) if higher else self

    def shared_costs(self) -> dict[str, float]:
        """``SHARED_COSTS`` of this profile, by name."""
        return {name: self._known(name) for name in SHARED_COSTS}

    def _known(self, name: str) -> float:
        return float(getattr(self, name) or 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON-able data."""
        return {**asdict(self), "place": self.place.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Profile:
        """The inverse of ``to_dict``; ConfigError, naming the field, for anything else."""
        names = {field.name for field in fields(cls)}
        if set(data) != names:
            wrong = ", ".join(sorted(set(data) ^ names))
            raise ConfigError(f"Profile: expected exactly its fields, missing or unknown: {wrong}")
        for name in names - {"place", "state_bytes"}:
            if is_amount(data[name]) and data[name] > LONGEST_S:
                raise ConfigError(f"Profile.{name}: expected seconds, got {data[name]!r}")
        try:
            place = SnapshotPlace(data["place"])
        except ValueError:
            raise ConfigError(f"Profile.place: unknown place {data['place']!r}") from None
        return cls(**{**data, "place": place})


def is_amount(value: Any) -> bool:
    """Whether ``value`` is a finite number >= 0, and not a bool."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= _LARGEST  # False for NaN, and for an int beyond floats
