"""What the run costs as far as it was measured, with a cached profile behind it. Pure.

A cached profile stands in for what is not known yet and is checked against the first
measurements: T after ``PROFILE_ITERATIONS`` clean iterations, the costs of a checkpoint after
two, or as soon after as noise lets it be told. Until then and a while longer its cost counts
beside those of this run, which are few.
"""

from __future__ import annotations

from dataclasses import replace

from checkfreq.policy.charges import Baseline
from checkfreq.policy.estimates import (
    OUTLIER,
    CheckpointCost,
    Estimate,
    IterationTime,
    RecentMedian,
)
from checkfreq.policy.observations import Iteration, Measured
from checkfreq.policy.profile import SHORTEST_S, Profile
from checkfreq.types import SnapshotPlace

#: Clean iterations before the first checkpoint, which is itself a measurement.
PROFILE_ITERATIONS = 10
#: A cached profile that is off by more than this factor is discarded.
_CACHE_TOLERANCE = {"iteration_s": 1.25, "cost_s": 2.0, "persist_s": 2.0}
#: Checkpoints of this run after which a cached cost counts no more; until then it fades evenly.
#: So many tell their mean to a third of their spread, and a cost that the check let pass though it
#: is off is soon forgotten.
_PRIOR_CHECKPOINTS = 8
_STALLS = 8
#: Standard errors that T may be off by.
_DOUBTS = 2.0


class RunCosts:
    """T, W, D, G, P, L and o (policy/profile.py) of this run."""

    def __init__(self, cached: Profile | None = None) -> None:
        self._cached: Profile | None = None
        self._unchecked = set(_CACHE_TOLERANCE)
        self._time = IterationTime()
        self._num_clean = 0
        self._overlap = RecentMedian()
        self._copy, self._device_copy = RecentMedian(), RecentMedian()
        self._persist, self._durable = RecentMedian(), RecentMedian()
        self._boundary = RecentMedian(window=16)
        self._cost = CheckpointCost()
        self._last_cost: Estimate | None = None
        self._num_costs = 0
        self._stalls = RecentMedian(window=_STALLS)
        self._touched = RecentMedian(window=_STALLS)
        self._state_bytes = 0
        if cached is not None:
            self.start_from(cached)

    def start_from(self, cached: Profile) -> None:
        """Until this run has measured its own, these are its costs."""
        self._cached = cached
        self._state_bytes = cached.state_bytes

    # ---- measurements

    def add_clean(self, iteration: Iteration) -> None:
        """An iteration that no checkpoint touched."""
        self._time.add(iteration.duration_s - iteration.stall_s)
        self._boundary.add(iteration.stall_s)
        self._num_clean += 1
        if iteration.overlap_s is not None:
            self._overlap.add(iteration.overlap_s)

    def update_time(self) -> None:
        """Follow the clean iterations up to the last: they were few, and waited for."""
        self._time.update()

    def renew_time(self, *, keep: int) -> None:
        """T is about to be measured again: of the earlier clean iterations ``keep`` count."""
        self._time.keep(keep)

    def add_durable(self, measured: Measured) -> None:
        """A checkpoint became durable."""
        self._copy.add(measured.copy_s)
        self._persist.add(measured.persist_s)
        self._durable.add(measured.durable_s)
        if measured.device_copy_s is not None:
            self._device_copy.add(measured.device_copy_s)
        self._state_bytes = measured.state_bytes

    def add_cost(self, cost_s: float, *, stall_s: float, num_touched: float = 0.0) -> None:
        """What a checkpoint added to the training time; of it, what training was held for.

        ``num_touched`` iterations were compared with T for it: it is as wrong as so many T.
        """
        self._cost.add(cost_s)
        self._num_costs += 1
        self._stalls.add(stall_s)
        self._touched.add(num_touched)
        self._last_cost = self._cost.value()

    def forget_costs(self) -> None:
        """Snapshots will be taken another way; the last estimate serves until there is one."""
        self._cost.clear()
        self._num_costs = 0
        self._stalls = RecentMedian(window=_STALLS)
        self._touched = RecentMedian(window=_STALLS)

    # ---- what is known

    @property
    def num_clean(self) -> int:
        """Clean iterations so far."""
        return self._num_clean

    @property
    def is_measured(self) -> bool:
        """Whether this run knows T and o of its own, if only from one checkpoint."""
        return self._num_clean >= PROFILE_ITERATIONS and self._last_cost is not None

    @property
    def iteration_s(self) -> float | None:
        """T, from the first clean iteration on."""
        own = self._time.value()
        return self._or_cached("iteration_s", own) if own is None else own

    @property
    def baseline(self) -> Baseline | None:
        """What an iteration takes; None before the first clean one."""
        own = self._time.value()
        if own is None:
            known = self.iteration_s
            return None if known is None else Baseline(known, known, OUTLIER * known)
        return Baseline(own, self._time.raw_mean() or own, self._time.limit())

    def over_s(self, iteration: Iteration) -> float:
        """What a clean iteration is above the limit from which it is an outlier."""
        return max(0.0, iteration.duration_s - iteration.stall_s - self._time.limit())

    @property
    def short_iteration_s(self) -> float | None:
        """Hardly any clean iteration is shorter."""
        return self._or_cached("iteration_s", self._time.low())

    @property
    def cost(self) -> Estimate | None:
        """o, of this run's own checkpoints; None before the first."""
        return self._last_cost

    @property
    def boundary_s(self) -> float:
        """b; 0 before the first clean iteration."""
        return self._or_cached("boundary_s", self._boundary.value()) or 0.0

    @property
    def copy_s(self) -> float:
        """D; 0 before the first."""
        return self._copy.value() or 0.0

    @property
    def durable_s(self) -> float | None:
        """L; None before the first."""
        return self._durable.value()

    def profile(self, place: SnapshotPlace) -> Profile | None:
        """All of it, snapshots being taken at ``place``; None while T or o is unknown."""
        own_time_s = self._time.value() if self._num_clean >= PROFILE_ITERATIONS else None
        iteration_s = self._or_cached("iteration_s", own_time_s)
        cost = self._known_cost(place)
        if iteration_s is None or cost is None:
            return None
        cost_s = max(cost.mean, self._stalls.value() or 0.0)
        return Profile(
            iteration_s=max(iteration_s, SHORTEST_S),
            overlap_s=self._or_cached("overlap_s", self._overlap.value()) or 0.0,
            host_copy_s=self._or_cached("host_copy_s", self._copy.value()) or 0.0,
            device_copy_s=self._or_cached("device_copy_s", self._device_copy.value()),
            persist_s=self._or_cached("persist_s", self._persist.value()) or 0.0,
            durable_s=self._or_cached("durable_s", self._durable.value()) or 0.0,
            cost_s=cost_s,
            cost_error_s=cost.error,
            cost_upper_s=max(cost_s, cost.upper()),
            state_bytes=self._state_bytes,
            boundary_s=self.boundary_s,
            place=place,
        )

    def _or_cached(self, name: str, own: float | None) -> float | None:
        cached: float | None = getattr(self._cached, name, None)
        return cached if own is None else own

    def _known_cost(self, place: SnapshotPlace) -> Estimate | None:
        """Of this run's own checkpoints, with the cached one as a prior that fades."""
        own, prior = self._own_cost(), self._cached_cost()
        if own is None or prior is None:
            return own or prior
        is_other = self._cached is not None and self._cached.place is not place
        part = 1.0 if is_other else min(1.0, self._num_costs / _PRIOR_CHECKPOINTS)
        return prior.blended(own, part=part)

    def _own_cost(self) -> Estimate | None:
        """The error of T is in every cost alike: more checkpoints make it no smaller."""
        if self._last_cost is None:
            return None
        return self._last_cost.plus_error((self._touched.value() or 0.0) * self._time.error())

    def doubt_s(self, num_touched: float) -> float:
        """What the error of T may come to in the iterations beyond those usually touched."""
        beyond = max(0.0, num_touched - (self._touched.value() or 0.0))
        return _DOUBTS * beyond * self._time.error()

    def _cached_cost(self) -> Estimate | None:
        known = self._cached
        if known is None:
            return None
        return Estimate.with_upper(known.cost_s, known.cost_upper_s, error=known.cost_error_s)

    # ---- the cached profile

    def check_cached(self) -> str | None:
        """Compare with what is known by now what was not yet compared.

        Returns why the cached profile was dropped just now; None if it was not.
        """
        if self._cached is None:
            return None
        for name, found in self._to_check().items():
            expected = getattr(self._cached, name)
            factor = _CACHE_TOLERANCE[name]
            if not found.may_be_in(expected / factor, expected * factor):
                self._cached = None
                return f"{name} is {found.mean:.3g} here and {expected:.3g} in the cached profile"
            if found.is_in(expected / factor, expected * factor):
                self._unchecked.discard(name)
        return None

    def _to_check(self) -> dict[str, Estimate]:
        """What is known of what was not compared yet, or not to an end."""
        found: dict[str, Estimate] = {}
        time_s, persist_s = self._time.value(), self._persist.value()
        if time_s is not None and self._num_clean >= PROFILE_ITERATIONS:
            found["iteration_s"] = Estimate(time_s, 0.0)
        own, cached = self._own_cost(), self._cached_cost()
        if own is not None and cached is not None and 2 <= self._num_costs <= _PRIOR_CHECKPOINTS:
            mean = max(own.mean, self._stalls.value() or 0.0)
            found["cost_s"] = replace(own, mean=mean).plus_error(cached.error)
            if persist_s is not None:
                found["persist_s"] = Estimate(persist_s, 0.0)
        return {name: value for name, value in found.items() if name in self._unchecked}
