"""A run under a hierarchy of failures: each takes the run back to what it left, from its source.

Costs are steady, and one start is stepped through and replayed up to each failure (replay.py).
From memory the run continues with the newest snapshot that was copied, once that is committed;
from disks with the newest durable checkpoint; from shared storage behind nodes with disks of their
own, with the newest that was copied there. Failures are a Poisson process in wall-clock time, and
strike in restarts too: what a second one takes down is lost as well.

A checkpoint that a run was restored from becomes durable, and is copied, while that run goes on. It
counts as held in memory. Of those before it, the newest that was safe then counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import is_amount
from checkfreq.simulation.costs import Costs, Noise, Rhythm, steady
from checkfreq.simulation.deciders import NewDecider
from checkfreq.simulation.domains import Domain
from checkfreq.simulation.engine import Run
from checkfreq.simulation.failures import Never
from checkfreq.simulation.outcome import Outcome
from checkfreq.simulation.replay import FailureFreeRun, Overlapping
from checkfreq.simulation.restarts import Kept, Restarts, Source, Way

_DAY_S = 86_400.0
_MOST_FAILURES = 200_000


@dataclass(slots=True)
class Returns:
    """The restarts from one source: how many, the work they lost, and the time they took."""

    count: int = 0
    lost_s: float = 0.0
    down_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Recovered:
    """An outcome, and the restarts by source; ``failures`` by what they took down.

    A failure that strikes in a restart begins it anew, so there are fewer restarts than failures.
    """

    outcome: Outcome
    returns: Mapping[Source, Returns]
    failures: Mapping[Domain, int]


class Strikes:
    """Draws failures one after the other: when, and what it takes down."""

    def __init__(self, per_day: Mapping[Domain, float], *, seed: int) -> None:
        self._domains = list(per_day)
        self._rates = list(per_day.values())
        self._mean_s = _DAY_S / sum(self._rates)
        self._random = Random(f"failures {seed}")
        self.next_s = 0.0
        self.struck = dict.fromkeys(per_day, 0)
        self._draw()

    def take(self) -> Domain:
        """What fails at ``next_s``; draws the failure after it."""
        domain = self._domain
        self.struck[domain] += 1
        if sum(self.struck.values()) > _MOST_FAILURES:
            raise ConfigError(
                f"more than {_MOST_FAILURES} failures: simulate a shorter run, or one that fails "
                f"less often than every {self._mean_s:.3g} s"
            )
        self._draw()
        return domain

    def _draw(self) -> None:
        self.next_s += self._random.expovariate(1 / self._mean_s)
        (self._domain,) = self._random.choices(self._domains, self._rates)


@dataclass(slots=True)
class _Restored:
    """The checkpoint that a start continues from: its progress, and from when each is kept."""

    work_s: float = 0.0
    kept_from_s: dict[Kept, float] = field(default_factory=lambda: dict.fromkeys(Kept, 0.0))


class _Life:
    """A run in progress: starts that failures end. Work is that since the run's beginning."""

    def __init__(self, start: FailureFreeRun, costs: Costs, restarts: Restarts) -> None:
        self._start = start
        self._costs = costs
        self._restarts = restarts
        self._ready_s = {Kept.COPIED: max(costs.stall_s, costs.copy_s)}
        self._ready_s[Kept.DURABLE] = costs.durable_s
        self._ready_s[Kept.MIRRORED] = costs.durable_s + restarts.mirror_s
        self._restored = _Restored()
        self._safe_s = dict.fromkeys(Kept, 0.0)  # progress of the newest before that
        self.up_s = 0.0
        self.progress_s = self.overhead_s = self.lost_s = self.down_s = 0.0
        self.num_checkpoints = 0
        self.returns = {source: Returns() for source in Source}

    def train(self, until_s: float) -> None:
        """No failure until then."""
        ran_s = until_s - self.up_s
        num_taken = self._start.num_taken(ran_s)
        added_s = self._start.overhead_s(ran_s, num_taken)
        self.num_checkpoints += num_taken
        self.overhead_s += added_s
        self.progress_s = self._restored.work_s + ran_s - added_s

    def fail(self, strikes: Strikes, *, until_s: float) -> None:
        """A failure strikes after training until then; the run comes back, or ends in a restart."""
        at_s = strikes.next_s
        way = self._restarts.way(strikes.take())
        up_s = self._up_s(way, at_s, at_s)
        while strikes.next_s < min(up_s, until_s):
            again_s = strikes.next_s
            way = way.worse(self._restarts.way(strikes.take()))
            up_s = self._up_s(way, again_s, at_s)
        up_s = min(up_s, until_s)
        kept = self._newest(way.kept, at_s)
        self._count(way.source, self.progress_s - kept.work_s, up_s - at_s)
        # What is newer than the checkpoint that the run goes back to was lost.
        self._safe_s = {each: min(kept.work_s, self._newest(each, at_s).work_s) for each in Kept}
        if way.kept is not Kept.COPIED and kept.kept_from_s[Kept.MIRRORED] > at_s:
            kept.kept_from_s[Kept.MIRRORED] = up_s + self._restarts.mirror_s  # copied anew
        self._restored, self.progress_s, self.up_s = kept, kept.work_s, up_s

    def _count(self, source: Source, lost_s: float, down_s: float) -> None:
        self.lost_s += lost_s
        self.down_s += down_s
        found = self.returns[source]
        found.count += 1
        found.lost_s += lost_s
        found.down_s += down_s

    def _up_s(self, way: Way, failed_s: float, stopped_s: float) -> float:
        """When a restart is done; a snapshot in memory is waited for until it is committed."""
        up_s = failed_s + self._restarts.seconds(way.source)
        if way.kept is Kept.COPIED:
            up_s = max(up_s, self._newest(Kept.COPIED, stopped_s).kept_from_s[Kept.DURABLE])
        return up_s

    def _newest(self, kept: Kept, at_s: float) -> _Restored:
        """The newest checkpoint that was kept in this way when a failure came."""
        newest = self._index(kept, at_s - self.up_s)
        if newest is not None:
            start_s = self.up_s + self._start.start_s(newest)
            return _Restored(
                self._restored.work_s + self._start.work_s(newest),
                {each: start_s + ready_s for each, ready_s in self._ready_s.items()},
            )
        if self._restored.kept_from_s[kept] <= at_s:
            return replace(self._restored, kept_from_s=dict(self._restored.kept_from_s))
        return _Restored(self._safe_s[kept])

    def _index(self, kept: Kept, ran_s: float) -> int | None:
        """Which of this start's checkpoints that is; None: none of them yet."""
        if kept is Kept.MIRRORED and self._restarts.mirror_s:
            return self._newest_mirrored(ran_s)
        return self._newest_ready(ran_s - self._ready_s[kept])

    def _newest_ready(self, begun_s: float) -> int | None:
        num_taken = self._start.num_taken(begun_s) if begun_s >= 0 else 0
        return num_taken - 1 if num_taken else None

    def _newest_mirrored(self, ran_s: float) -> int | None:
        """Copies are made one at a time, each of the newest checkpoint that is durable then.

        Where one takes longer than an interval, they follow one another without a pause.
        """
        first = self._start.num_taken(ran_s)
        if not first:
            return None
        durable_s, copy_s = self._costs.durable_s, self._restarts.mirror_s
        begins_s = self._start.start_s(0) + durable_s
        spacing_s = (self._start.start_s(first - 1) - self._start.start_s(0)) / max(1, first - 1)
        if copy_s <= spacing_s:
            return self._newest_ready(ran_s - durable_s - copy_s)
        num_done = math.floor((ran_s - begins_s) / copy_s)
        if num_done < 1:
            return None
        return self._newest_ready(begins_s + (num_done - 1) * copy_s - durable_s)


def recover(
    costs: Costs,
    new_decider: NewDecider,
    *,
    per_day: Mapping[Domain, float],
    restarts: Restarts,
    wall_s: float,
    seed: int = 0,
    max_overhead: float = 0.035,
) -> Recovered:
    """A run of ``wall_s`` seconds with ``per_day`` failures of each domain.

    The same arguments give the same outcome, and the same seed the same failures to all deciders.
    ``Outcome.excess_s`` and ``exempt_s`` are not counted (0). Raises ConfigError for checkpoints
    that overlap one another, whose slowdown a replay cannot tell.
    """
    if not (is_amount(wall_s) and wall_s > 0):
        raise ConfigError(f"wall_s: expected finite seconds > 0, got {wall_s}")
    run = Run(
        steady(costs), new_decider, failures=Never(), restart_s=0.0, noise=Noise(),
        rhythm=Rhythm(), seed=seed, max_overhead=max_overhead, keep_profile=False,
    )  # fmt: skip
    strikes = Strikes(per_day, seed=seed)
    life = _Life(FailureFreeRun(run, costs, max_overhead), costs, restarts)
    try:
        while life.up_s < wall_s:
            life.train(min(strikes.next_s, wall_s))
            if strikes.next_s >= wall_s:
                break
            life.fail(strikes, until_s=wall_s)
    except Overlapping:
        raise ConfigError(
            "failures of processes, nodes and racks: expected checkpoints that do not overlap: a "
            "copy that does not outlast the stall"
        ) from None
    return Recovered(_outcome(life, run, costs, strikes, wall_s), life.returns, strikes.struck)


def _outcome(life: _Life, run: Run, costs: Costs, strikes: Strikes, wall_s: float) -> Outcome:
    return replace(
        run.outcome(),
        wall_s=wall_s,
        progress_s=life.progress_s,
        overhead_s=life.overhead_s,
        lost_s=life.lost_s,
        down_s=life.down_s,
        excess_s=0.0,
        largest_cost_s=costs.cost_s if life.num_checkpoints else 0.0,
        exempt_s=0.0,
        num_iterations=round((life.progress_s + life.lost_s) / costs.iteration_s),
        num_failures=sum(strikes.struck.values()),
        num_checkpoints=life.num_checkpoints,
    )
