"""What each checkpoint added to the training time. Pure.

The time by which an iteration exceeds T, whether training was held or slowed down, is charged to
the checkpoints that *touched* it: those begun before its end and not ended before its start. The
first iterations after a checkpoint are its aftermath and are charged to it too, unless the next
one has begun: old files are being removed and caches are cold. Then it is over. It is settled a
few clean iterations later, when it can be compared with those around it instead of with T.

Iterations and checkpoints may be reported in any order; on a device, whose events are read late,
an iteration is often reported long after the checkpoints that touched it have ended.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from checkfreq.policy.estimates import OUTLIER
from checkfreq.policy.observations import Iteration, Measured

#: Checkpoints before an unusual cost can be told from a usual one: fewer have no majority.
_USUAL_FROM = 3
#: Iterations after a checkpoint that it still slows down (measured in 2026-11: the first two, by 1
#: to 2 % of T).
AFTERMATH_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class Baseline:
    """How long an iteration takes without checkpoints, in seconds.

    limit_s: longer iterations are outliers. iteration_s (T): the mean, an outlier counted as
    ``limit_s``. raw_s: the mean, outliers counted in full.
    """

    iteration_s: float
    raw_s: float
    limit_s: float


@dataclass(slots=True, eq=False)
class Charge:
    """The time charged to one checkpoint so far."""

    start_s: float
    reserved_s: float
    end_s: float = math.inf
    measured: Measured | None = None
    excess_s: float = 0.0  # by how much its iterations exceed the raw mean
    capped_s: float = 0.0  # by how much they exceed T, outliers capped, stalls in full
    stall_s: float = 0.0
    touched_s: float = 0.0  # its share of the time of iterations compared with T
    compared_s: float = 0.0  # and of the T that they were compared with
    num_touched: float = 0.0  # its share of their number
    is_partial: bool = False  # it touched iterations that could not be compared
    has_waited: bool = False  # the user waited for it: its cost is not a periodic one's
    num_after: int = 0  # iterations of its aftermath so far
    is_over: bool = False  # it slows nothing down any more
    num_clean: int = 0  # clean iterations since
    noise_s: float = 0.0  # standard deviation of its cost due to noise, as far as it is known
    weight: float = 1.0  # how much it tells about the cost of others, beside one among equals
    cost_s: float = 0.0  # once settled: the cost that it is charged with
    uncharged_s: float = 0.0  # and the rest, which looks like outliers

    def overlap_s(self, iteration: Iteration) -> float:
        """How long it was in flight during ``iteration``; 0 or less if it was not."""
        return min(self.end_s, iteration.end_s) - max(self.start_s, iteration.start_s)

    def compare_with(self, iteration_s: float) -> None:
        """Compare its iterations with ``iteration_s`` instead of with T."""
        more_s = self.compared_s - self.num_touched * iteration_s
        self.cost_s += more_s
        self.capped_s += more_s
        self.compared_s -= more_s

    def is_faster_than(self, iteration_s: float) -> bool:
        """Whether its iterations were shorter than ``iteration_s``, on average."""
        return self.touched_s < iteration_s * self.num_touched


class Outliers:
    """Decides whether the outliers that were not charged belong to checkpoints after all.

    A validation in a plain loop comes whether or not a checkpoint is in flight. If outliers are
    much more frequent beside checkpoints than elsewhere, checkpoints cause them and owe their time.
    """

    #: Fewer may have met a checkpoint by chance.
    _LEAST = 3
    #: Times as much time in outliers, per iteration, as in clean iterations.
    _MUCH = 3.0

    def __init__(self) -> None:
        self._clean_s = self._touched_s = 0.0
        self._num_clean = self._num_touched = 0.0
        self._num_outliers = 0

    def add_clean(self, over_s: float) -> None:
        """A clean iteration exceeded the limit by ``over_s`` (0 if it did not)."""
        self._clean_s += over_s
        self._num_clean += 1

    def add(self, charge: Charge) -> float:
        """Take in a settled checkpoint; returns how much of the uncharged time is owed now."""
        self._num_touched += charge.num_touched
        self._touched_s += charge.uncharged_s
        self._num_outliers += charge.uncharged_s > 0.0
        if self._num_outliers < self._LEAST:
            return 0.0
        anyway_s = self._clean_s / max(1.0, self._num_clean) * self._num_touched
        if self._touched_s <= self._MUCH * anyway_s:
            return 0.0
        owed_s = self._touched_s - anyway_s
        # Start over: what is owed now must not be asked for again.
        self._clean_s = self._touched_s = self._num_clean = self._num_touched = 0.0
        return owed_s


class Charges:
    """Checkpoints that are not settled, by name; its length is that of those not over."""

    def __init__(self) -> None:
        self._open: dict[str, Charge] = {}
        self._costs: deque[tuple[float, float]] = deque(maxlen=8)  # (excess, capped) each

    def __len__(self) -> int:
        return sum(not charge.is_over for charge in self._open.values())

    def __bool__(self) -> bool:
        return len(self) > 0 if self._open else False

    @property
    def is_empty(self) -> bool:
        """Whether all are settled."""
        return not self._open

    def begin(self, name: str, *, start_s: float, reserved_s: float) -> None:
        """A snapshot was begun, for which ``reserved_s`` of the budget are set aside."""
        assert name not in self._open, f"two attempts named {name}"
        self._open[name] = Charge(start_s, reserved_s)

    def end(self, name: str, *, end_s: float, measured: Measured | None) -> bool:
        """It is durable or has failed; False if no checkpoint of that name is in flight."""
        charge = self._open.get(name)
        if charge is None or charge.end_s < math.inf:
            return False
        charge.end_s = max(end_s, charge.start_s)
        charge.measured = measured
        return True

    def add(self, iteration: Iteration, *, baseline: Baseline | None) -> bool:
        """Share an iteration among the checkpoints that touched it; False if none did.

        Without a ``baseline`` to compare this iteration with, only stalls are charged.
        """
        touching = [c for c in self._open.values() if c.overlap_s(iteration) > 0]
        if not touching:
            return self._add_aftermath(iteration, baseline)
        whole_s = sum(charge.overlap_s(iteration) for charge in touching)
        for charge in touching:
            _charge(charge, iteration, charge.overlap_s(iteration) / whole_s, baseline)
        last = touching[-1]
        # The aftermath of earlier ones cannot be told from the last one, which gets it all.
        for charge in self._open.values():
            charge.is_over |= charge is not last and charge.end_s <= iteration.end_s
        return True

    def _add_aftermath(self, iteration: Iteration, baseline: Baseline | None) -> bool:
        ended = [
            charge
            for charge in self._open.values()
            if charge.end_s <= iteration.start_s and not charge.is_over
        ]
        for charge in ended:
            _charge(charge, iteration, 1 / len(ended), baseline)
            charge.num_after += 1
            charge.is_over |= iteration.is_quiet and charge.num_after >= AFTERMATH_ITERATIONS
        return bool(ended)

    def add_clean(self) -> None:
        """A clean iteration has ended."""
        for charge in self._open.values():
            charge.num_clean += charge.is_over

    def settle(self, *, after: int = 0) -> list[Charge]:
        """Remove the checkpoints that are over and return them with their costs.

        Those wait for ``after`` clean iterations, unless the next checkpoint has begun.
        """
        wanted = 0 if len(self) else after
        names = [n for n, c in self._open.items() if c.is_over and c.num_clean >= wanted]
        settled = [self._open.pop(name) for name in names]
        for charge in settled:
            failed = charge.measured is None  # says nothing about those that succeed
            charge.cost_s = charge.capped_s if failed else self._plausible_s(charge)
            charge.uncharged_s = max(0.0, charge.excess_s - charge.cost_s)
        return settled

    def in_flight(self, now_s: float) -> list[Charge]:
        """Checkpoints that have not ended at ``now_s``."""
        return [charge for charge in self._open.values() if charge.end_s > now_s]

    def unreserved_s(self) -> float:
        """By how much open checkpoints already exceed what was reserved for them."""
        return sum(max(0.0, c.capped_s - c.reserved_s) for c in self._open.values())

    def forget_costs(self) -> None:
        """Later checkpoints are taken in a different way: earlier costs do not apply."""
        self._costs.clear()

    def _plausible_s(self, charge: Charge) -> float:
        """The capped cost, or the full one if checkpoints usually have outliers.

        The full cost must not be the rule: it is compared with the raw mean, so that a checkpoint
        without an outlier would come out below zero as often as one with an outlier is spared.
        """
        self._costs.append((charge.excess_s, charge.capped_s))
        usual_s = median(excess_s for excess_s, _ in self._costs)
        has_outliers = usual_s > max(0.0, median(capped_s for _, capped_s in self._costs))
        is_usual = len(self._costs) >= _USUAL_FROM and charge.excess_s <= OUTLIER * usual_s
        if not (has_outliers and is_usual):
            return charge.capped_s
        return max(charge.excess_s, charge.capped_s)


def _charge(charge: Charge, iteration: Iteration, share: float, baseline: Baseline | None) -> None:
    stall_s = share * iteration.stall_s
    charge.has_waited |= iteration.waited_s > 0
    charge.stall_s += stall_s
    if baseline is None:
        charge.excess_s += stall_s
        charge.capped_s += stall_s
        charge.is_partial = True
        return
    moved_s = iteration.moved_s
    charge.excess_s += stall_s + share * (moved_s - baseline.raw_s)
    charge.capped_s += stall_s + share * (min(moved_s, baseline.limit_s) - baseline.iteration_s)
    charge.touched_s += share * iteration.duration_s
    charge.num_touched += share
    charge.compared_s += share * baseline.iteration_s
