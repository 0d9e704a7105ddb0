"""The measured costs of a run, with the cached profile of an earlier run behind them. Pure.

A cached profile stands in for what is not known yet and is checked against the first
measurements: T after ``PROFILE_ITERATIONS`` clean iterations, the costs of a checkpoint after
two checkpoints, or later if noise hides the answer; that they are far lower, after the first, since
the second is far off then. Its cost then fades out as this run's own
costs, few at first, come in.
"""

from __future__ import annotations

import math
from dataclasses import replace

from checkfreq.policy.charges import Baseline
from checkfreq.policy.checkpoint_cost import WINDOW, CheckpointCost
from checkfreq.policy.estimates import OUTLIER, Estimate, IterationTime, RecentMedian
from checkfreq.policy.observations import Iteration, Measured
from checkfreq.policy.profile import SHORTEST_S, Profile
from checkfreq.types import SnapshotPlace

#: Clean iterations before T counts as measured: with noise of 10 % ten of them tell it to 3 %.
PROFILE_ITERATIONS = 10
#: Before the first plan fewer will do: the budget holds checkpoints back that it cannot pay.
FIRST_ITERATIONS = 2
#: A cached profile is discarded if it is wrong by more than this factor. T is known better than the
#: costs of two checkpoints are, so less is tolerated of it.
_CACHE_TOLERANCE = {"iteration_s": 1.25, "cost_s": 2.0, "persist_s": 2.0}
#: Checkpoints of this run over which a cached cost fades out evenly. So many tell their mean to a
#: third of their spread, and a wrong cost that passed the check is soon forgotten.
_PRIOR_CHECKPOINTS = 8
#: Checkpoints whose median stall and number of touched iterations count.
_STALLS = 8
#: Standard errors by which T may be wrong: 95 % of the time it is not.
_DOUBTS = 2.0
#: What is believed of the slowdown of an iteration beside a checkpoint before it is measured: this
#: part of T, give or take as much again. On the machines measured so far it was 0 to 6 %. Where
#: noise is so large that a few costs say less than that, it keeps plans from following them.
_SLOWDOWN = 0.02
#: Of costs that are not paired with their neighbours, which all share the error of T, more than so
#: many reduce no error.
_UNPAIRED_WINDOW = 20
#: Costs before their spread tells how far off one of them may be.
_FEW = 4
#: Clean iterations on both sides of the first checkpoint that counts.
_LEAST_COMPARED = 8


class RunCosts:
    """Estimates of T, W, D, G, P, L and o (policy/profile.py) of this run.

    ``paired``: costs are differences to neighbouring iterations, with independent errors.
    """

    def __init__(self, cached: Profile | None = None, *, paired: bool = True) -> None:
        self._is_paired = paired
        self._cached: Profile | None = None
        self._unchecked = set(_CACHE_TOLERANCE)
        self._time = IterationTime()
        self._num_clean = 0
        self._overlap = RecentMedian()
        self._copy, self._device_copy = RecentMedian(), RecentMedian()
        self._persist, self._durable = RecentMedian(), RecentMedian()
        self._boundary = RecentMedian(window=16)
        self._cost = CheckpointCost(WINDOW if paired else _UNPAIRED_WINDOW)
        self._last_cost: Estimate | None = None
        self._num_costs = 0
        self._stalls = RecentMedian(window=_STALLS)
        self._touched = RecentMedian(window=_STALLS)
        self._state_bytes = 0
        if cached is not None:
            self.start_from(cached)

    def start_from(self, cached: Profile) -> None:
        """Use the costs of an earlier run until this run has measured its own."""
        self._cached = cached
        self._state_bytes = cached.state_bytes

    # ---- measurements

    def add_clean(self, iteration: Iteration) -> None:
        """An iteration that no checkpoint touched."""
        self._time.add(iteration.moved_s)
        self._boundary.add(iteration.stall_s)
        self._num_clean += 1
        if iteration.overlap_s is not None:
            self._overlap.add(iteration.overlap_s)

    def update_time(self) -> None:
        """Bring T up to date at once, for few clean iterations that checkpoints wait for."""
        self._time.update()

    def renew_time(self, *, keep: int) -> None:
        """T is about to be measured again: forget all but the newest ``keep`` clean iterations."""
        self._time.keep(keep)

    def add_durable(self, measured: Measured) -> None:
        """A checkpoint became durable."""
        self._copy.add(measured.copy_s)
        self._persist.add(measured.persist_s)
        self._durable.add(measured.durable_s)
        if measured.device_copy_s is not None:
            self._device_copy.add(measured.device_copy_s)
        self._state_bytes = measured.state_bytes

    def add_cost(
        self, cost_s: float, *, stall_s: float, num_touched: float = 0.0, weight: float = 1.0
    ) -> None:
        """What a checkpoint added to the training time; ``stall_s`` is the part that held training.

        ``num_touched`` iterations were compared with clean ones. ``weight``: how much it tells.
        """
        self._cost.add(cost_s, weight=weight, num_clean=self._num_clean)
        self._num_costs += 1
        self._stalls.add(stall_s)
        self._touched.add(num_touched)
        self._last_cost = self._cost.value()

    def forget_costs(self) -> None:
        """Snapshots will be taken in a different place; the last estimate serves meanwhile."""
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
        """Whether this run has measured its own T and o, the latter at least once."""
        return self._num_clean >= FIRST_ITERATIONS and self._last_cost is not None

    @property
    def iteration_s(self) -> float | None:
        """T; None before the first clean iteration, unless it is cached."""
        own = self._time.value()
        return self._or_cached("iteration_s", own) if own is None else own

    @property
    def baseline(self) -> Baseline | None:
        """What iterations are compared with; None while T is unknown."""
        own = self._time.value()
        if own is None:
            known = self.iteration_s
            return None if known is None else Baseline(known, known, OUTLIER * known)
        return Baseline(own, self._time.raw_mean() or own, self._time.limit())

    @property
    def limit_s(self) -> float:
        """A clean iteration that takes longer is an outlier; as of the last T."""
        return self._time.limit()

    def spread_s(self, num: float = 1.0) -> float:
        """Standard deviation of the sum of ``num`` clean iterations in a row."""
        return self._time.spread(num)

    @property
    def short_iteration_s(self) -> float | None:
        """Nine in ten clean iterations take at least this long; None while T is unknown."""
        return self._or_cached("iteration_s", self._time.low())

    @property
    def cost(self) -> Estimate | None:
        """o, from this run's own checkpoints; None before the first."""
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
        """All costs, for snapshots taken at ``place``; None while T or o is unknown."""
        own_time_s = self._time.value() if self._num_clean >= FIRST_ITERATIONS else None
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
        """The estimate of o from this run's checkpoints, with the cached one as a fading prior."""
        own, prior = self._own_cost(), self._cached_cost()
        if own is None or prior is None:
            return own or prior
        is_other = self._cached is not None and self._cached.place is not place
        part = 1.0 if is_other else min(1.0, self._num_costs / _PRIOR_CHECKPOINTS)
        return prior.blended(own, part=part)

    def _own_cost(self) -> Estimate | None:
        """With what is believed where noise hides the answer."""
        found = self._found_cost()
        return found if found is None or not self._is_paired else self._believed(found)

    def _found_cost(self) -> Estimate | None:
        """With the error that costs share."""
        if self._last_cost is None:
            return None
        if not self._is_paired:
            # All were compared with the same T: more checkpoints do not reduce its error.
            return self._last_cost.plus_error((self._touched.value() or 0.0) * self._time.error())
        shared_s, own_s = self._chance_s()
        found = self._last_cost.plus_error(shared_s)
        return found.plus_error(own_s) if len(self._cost) < _FEW else found

    def _chance_s(self) -> tuple[float, float]:
        """How far noise may move the mean cost: what costs share of it, and what they do not."""
        touched = self._touched.value() or 0.0
        # Where checkpoints follow one another closely, many are compared with the same few.
        compared = self._cost.num_compared(self._num_clean) + _LEAST_COMPARED
        compared = max(1, min(compared, self._num_clean))
        shared_s = touched * self._time.spread() / math.sqrt(compared)
        return shared_s, self._time.spread(touched) / math.sqrt(len(self._cost) or 1)

    def _believed(self, found: Estimate) -> Estimate:
        """``found`` blended with the prior slowdown by inverse variances, chance for its own."""
        prior_s = _SLOWDOWN * (self._touched.value() or 0.0) * (self.iteration_s or 0.0)
        chance_s = math.hypot(*self._chance_s())
        if not prior_s or not chance_s:
            return found
        part = prior_s**2 / (prior_s**2 + chance_s**2)
        stall_s = self._stalls.value() or 0.0
        return Estimate(stall_s + prior_s, prior_s).blended(found, part=part)

    def doubt_s(self, num_touched: float) -> float:
        """What an error of T may add up to in the iterations beyond the usual number touched."""
        beyond = max(0.0, num_touched - (self._touched.value() or 0.0))
        return _DOUBTS * beyond * self._time.error()

    def _cached_cost(self) -> Estimate | None:
        known = self._cached
        if known is None:
            return None
        return Estimate.with_upper(known.cost_s, known.cost_upper_s, error=known.cost_error_s)

    # ---- the cached profile

    def check_cached(self) -> str | None:
        """Compare the cached profile with what has been measured since the last call.

        Returns the reason if it was discarded by this call; None otherwise.
        """
        if self._cached is None:
            return None
        for name, found in self._to_check().items():
            expected = getattr(self._cached, name)
            low, high = expected / _CACHE_TOLERANCE[name], expected * _CACHE_TOLERANCE[name]
            # A single checkpoint may well be dearer than others, by chance or as the first.
            is_first = name != "iteration_s" and self._num_costs == 1
            if not found.may_be_in(low, math.inf if is_first else high):
                self._cached = None
                return f"{name} is {found.mean:.3g} here and {expected:.3g} in the cached profile"
            if found.is_in(low, high) and not is_first:
                self._unchecked.discard(name)
        return None

    def _to_check(self) -> dict[str, Estimate]:
        """Measurements of what is unchecked, or was too uncertain to be checked."""
        found: dict[str, Estimate] = {}
        time_s, persist_s = self._time.value(), self._persist.value()
        if time_s is not None and self._num_clean >= PROFILE_ITERATIONS:
            found["iteration_s"] = Estimate(time_s, 0.0)
        own, cached = self._found_cost(), self._cached_cost()
        if own is not None and cached is not None and 1 <= self._num_costs <= _PRIOR_CHECKPOINTS:
            mean = max(own.mean, self._stalls.value() or 0.0)
            found["cost_s"] = replace(own, mean=mean).plus_error(cached.error)
            if persist_s is not None:
                found["persist_s"] = Estimate(persist_s, 0.0)
        return {name: value for name, value in found.items() if name in self._unchecked}
