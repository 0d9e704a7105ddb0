"""What each checkpoint added to the training time. Pure.

An iteration is charged with what it took longer than T, held or slowed down, to the checkpoints
that touched it: those begun before its end and not ended before its start. The iterations right
after a checkpoint, until the next begins, are its aftermath and charged to it too: old files are
being removed and caches are cold. Both may be told in any order, iterations also long after the
checkpoints that touched them ended (a device's events come late).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from checkfreq.policy.estimates import OUTLIER
from checkfreq.policy.observations import Iteration, Measured

#: Costs before what is usual can be told from what is not.
_USUAL_FROM = 3
#: Iterations after a checkpoint that still feel it (measured: 1 to 2 % of T in the first two,
#: 2026-11).
AFTERMATH_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class Baseline:
    """What an iteration takes without checkpoints, in seconds.

    iteration_s (T) is a mean in which an iteration counts for at most ``limit_s``; raw_s is
    the mean of them as they were.
    """

    iteration_s: float
    raw_s: float
    limit_s: float


@dataclass(slots=True, eq=False)
class Charge:
    """What one checkpoint is charged with so far."""

    start_s: float
    reserved_s: float
    end_s: float = math.inf
    measured: Measured | None = None
    excess_s: float = 0.0  # all that its iterations took longer than the plain mean
    capped_s: float = 0.0  # longer than T, each counting for at most the limit, unless held
    stall_s: float = 0.0
    touched_s: float = 0.0  # its share of the time of iterations that T is known for
    num_touched: float = 0.0  # its share of their number
    is_partial: bool = False  # touched others too
    has_waited: bool = False  # the user waited for it: its cost is like no other's
    num_after: int = 0  # iterations of its aftermath so far
    is_over: bool = False  # nothing of it is felt any more
    cost_s: float = 0.0  # once settled: what of all this is taken as its cost
    uncharged_s: float = 0.0  # and what is not

    def overlap_s(self, iteration: Iteration) -> float:
        """Seconds of ``iteration`` that it was in flight; not above 0 if none."""
        return min(self.end_s, iteration.end_s) - max(self.start_s, iteration.start_s)

    def is_faster_than(self, iteration_s: float) -> bool:
        """Whether its iterations were shorter than ``iteration_s``, on average."""
        return self.touched_s < iteration_s * self.num_touched


class Outliers:
    """Whose the outliers are that no checkpoint was charged with.

    A validation in a plain loop comes whether a checkpoint is in flight or not. Outliers that
    come much oftener where one is are its doing, and are owed after all.
    """

    _LEAST = 3
    _MUCH = 3.0

    def __init__(self) -> None:
        self._clean_s = self._touched_s = 0.0
        self._num_clean = self._num_touched = 0.0
        self._num_outliers = 0

    def add_clean(self, over_s: float) -> None:
        """An iteration that no checkpoint touched was so much above the limit (or 0)."""
        self._clean_s += over_s
        self._num_clean += 1

    def add(self, charge: Charge) -> float:
        """A checkpoint settled; returns what is owed now of what was forgiven so far."""
        self._num_touched += charge.num_touched
        self._touched_s += charge.uncharged_s
        self._num_outliers += charge.uncharged_s > 0.0
        if self._num_outliers < self._LEAST:
            return 0.0
        anyway_s = self._clean_s / max(1.0, self._num_clean) * self._num_touched
        if self._touched_s <= self._MUCH * anyway_s:
            return 0.0
        owed_s = self._touched_s - anyway_s
        self._clean_s = self._touched_s = self._num_clean = self._num_touched = 0.0
        return owed_s


class Charges:
    """The checkpoints that are in flight or not settled yet, by name."""

    def __init__(self) -> None:
        self._open: dict[str, Charge] = {}
        self._costs: deque[tuple[float, float]] = deque(maxlen=8)  # (excess, mild) each

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, name: str, *, start_s: float, reserved_s: float) -> None:
        """A snapshot was begun; ``reserved_s`` were taken off the budget for it."""
        assert name not in self._open, f"two attempts named {name}"
        self._open[name] = Charge(start_s, reserved_s)

    def end(self, name: str, *, end_s: float, measured: Measured | None) -> bool:
        """It is durable or has failed; False if no such one is in flight."""
        charge = self._open.get(name)
        if charge is None or charge.end_s < math.inf:
            return False
        charge.end_s = max(end_s, charge.start_s)
        charge.measured = measured
        return True

    def add(self, iteration: Iteration, *, baseline: Baseline | None) -> bool:
        """Share an iteration among the checkpoints that touched it; False if none did.

        ``baseline`` is None where it says nothing of this one: only stalls count then.
        """
        touching = [c for c in self._open.values() if c.overlap_s(iteration) > 0]
        if not touching:
            return self._add_aftermath(iteration, baseline)
        whole_s = sum(charge.overlap_s(iteration) for charge in touching)
        for charge in touching:
            _charge(charge, iteration, charge.overlap_s(iteration) / whole_s, baseline)
        last = touching[-1]
        for charge in self._open.values():  # what is left of the others is felt as part of that
            charge.is_over |= charge is not last and charge.end_s <= iteration.end_s
        return True

    def _add_aftermath(self, iteration: Iteration, baseline: Baseline | None) -> bool:
        ended = [charge for charge in self._open.values() if charge.end_s <= iteration.start_s]
        for charge in ended:
            _charge(charge, iteration, 1 / len(ended), baseline)
            charge.num_after += 1
            charge.is_over |= iteration.is_quiet and charge.num_after >= AFTERMATH_ITERATIONS
        return bool(ended)

    def settle(self) -> list[Charge]:
        """Take out those that are over."""
        names = [name for name, charge in self._open.items() if charge.is_over]
        settled = [self._open.pop(name) for name in names]
        for charge in settled:
            failed = charge.measured is None  # those that do not fail cost something else
            charge.cost_s = charge.capped_s if failed else self._plausible_s(charge)
            charge.uncharged_s = max(0.0, charge.excess_s - charge.cost_s)
        return settled

    def in_flight(self, now_s: float) -> list[Charge]:
        """Those that are not over at ``now_s``."""
        return [charge for charge in self._open.values() if charge.end_s > now_s]

    def unreserved_s(self) -> float:
        """What open ones cost already beyond what was reserved for them."""
        return sum(max(0.0, c.capped_s - c.reserved_s) for c in self._open.values())

    def forget_costs(self) -> None:
        """Those to come are of another kind."""
        self._costs.clear()

    def _plausible_s(self, charge: Charge) -> float:
        """What counts outliers in part, as T does; in full where checkpoints usually have them.

        Against the plain mean one without outliers would be worth less than nothing, as often as
        those with them are forgiven.
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
    moved_s = iteration.duration_s - iteration.stall_s
    charge.excess_s += stall_s + share * (moved_s - baseline.raw_s)
    charge.capped_s += stall_s + share * (min(moved_s, baseline.limit_s) - baseline.iteration_s)
    charge.touched_s += share * iteration.duration_s
    charge.num_touched += share
