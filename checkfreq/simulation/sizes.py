"""A run at several numbers of GPUs, one rank each: what ranks add to its costs, and how it fails.

The costs of iterations and checkpoints are the same at any size: each rank has the same work, and
storage grows with the cluster. What grows with the ranks is meetings, commits and restores
(rank_costs.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.simulation.comparison import Arm, choices
from checkfreq.simulation.costs import Costs
from checkfreq.simulation.domains import Domain, Hierarchy
from checkfreq.simulation.meeting import meeting, with_meetings, without_meetings
from checkfreq.simulation.rank_costs import FREE, RankCosts
from checkfreq.simulation.recovery import Recovered, recover
from checkfreq.simulation.restarts import Restarts

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSize:
    """What a run costs at a number of GPUs.

    costs: with the commit. boundary_s: what meetings add to an iteration on average. meeting_s: one
    of them. planning_s: reading records and planning, at a restart.
    """

    num_gpus: int
    costs: Costs
    boundary_s: float
    meeting_s: float
    commit_s: float
    planning_s: float

    @property
    def meetings(self) -> float:
        """The part of the work that meetings add."""
        return self.boundary_s / self.costs.iteration_s


def at_size(
    costs: Costs, num_gpus: int, *, rank_costs: RankCosts = FREE, max_overhead: float = 0.035
) -> AtSize:
    """The costs of a run of so many GPUs; ``costs`` without what ranks add."""
    commit_s = rank_costs.seconds("commit", num_gpus)
    policy = FrequencyPolicy(max_overhead=max_overhead)
    own = replace(costs, persist_s=costs.persist_s + commit_s)
    return AtSize(
        num_gpus=num_gpus,
        costs=own,
        boundary_s=rank_costs.boundary_s(
            num_gpus,
            iteration_s=costs.iteration_s,
            interval_steps=policy.plan(own.profile()).interval_steps,
            max_overhead=max_overhead,
        ),
        meeting_s=rank_costs.seconds("meeting", num_gpus),
        commit_s=commit_s,
        planning_s=rank_costs.seconds("restore", num_gpus),
    )


@dataclass(frozen=True, slots=True)
class RecoveredArm:
    """A way to choose the interval, its outcome, and its restarts."""

    arm: Arm
    recovered: Recovered


def compare_recoveries(
    size: AtSize,
    *,
    hierarchy: Hierarchy,
    restarts: Restarts,
    max_overhead: float = 0.035,
    interval_s: float = 1800.0,
    days: float | None = None,
    seed: int = 0,
    names: Collection[str] | None = None,
) -> Iterator[RecoveredArm]:
    """The arms of ``compare``, in turn, under the same failures of processes, nodes and racks.

    ``days`` None: enough for a thousand failures. ``names``: these arms alone.
    """
    per_day = hierarchy.at(size.num_gpus)
    mtbf_s = mtbf_of(per_day)
    for name, new_decider, is_limited in choices(
        size.costs, mtbf_s=mtbf_s, max_overhead=max_overhead, interval_s=interval_s
    ):
        if names is not None and name not in names:
            continue
        found = recover(
            with_meetings(size.costs, size.boundary_s),
            meeting(new_decider, size.boundary_s),
            per_day=per_day,
            restarts=restarts,
            wall_s=1000 * mtbf_s if days is None else days * _DAY_S,
            seed=seed,
            max_overhead=max_overhead,
        )
        outcome = without_meetings(found.outcome, size.costs, size.boundary_s)
        work = size.costs.iteration_s / (size.costs.iteration_s + size.boundary_s)
        for each in found.returns.values():
            each.lost_s *= work
        yield RecoveredArm(Arm(name, outcome, is_limited), replace(found, outcome=outcome))


def mtbf_of(per_day: dict[Domain, float]) -> float:
    """Mean time between failures of any kind, in seconds."""
    return _DAY_S / sum(per_day.values())
