"""Restarts from memory, from nodes' disks and from shared storage, by number of GPUs.

Failures take down a process, a node or a rack (checkfreq/simulation/domains.py), at the published
rate in all. ``goodput`` is that of two ways to choose the interval, with what ranks cost one
another and (``free``) without; ``restarts`` are those of the first: how many in a day, how long one
takes, and the work that it loses, means over all seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.lab.tables import Line
from checkfreq.simulation.costs import Costs
from checkfreq.simulation.domains import Hierarchy, shares_of
from checkfreq.simulation.failures import Rate
from checkfreq.simulation.recovery import Recovered
from checkfreq.simulation.restarts import READING, Restarts, Source, Storage
from checkfreq.simulation.sizes import AtSize, at_size, compare_recoveries, mtbf_of

ARMS = ("daly", "auto mtbf_s")
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where checkpoints are, how large one is, and how often things fail."""

    storage: Storage
    state_bytes: int
    rate: Rate

    @property
    def hierarchy(self) -> Hierarchy:
        """Failures per day of each process, node and rack."""
        return Hierarchy.published(self.rate.value, shares_of(self.rate))


def report_recovery(
    size: AtSize,
    costs: Costs,
    cluster: Cluster,
    *,
    fixed_s: float,
    bound: float,
    seeds: int,
    days: float | None,
) -> Line:
    """The figures of one size; ``costs`` are those without ranks."""
    free = at_size(costs, size.num_gpus, max_overhead=bound)
    options = {"fixed_s": fixed_s, "bound": bound, "days": days}
    with_ranks = [_runs(size, cluster, seed=seed, **options) for seed in range(seeds)]
    without = [_runs(free, cluster, seed=seed, **options) for seed in range(seeds)]
    hierarchy = cluster.hierarchy
    per_day = hierarchy.at(size.num_gpus)
    return {
        "checkpoints_on": cluster.storage.value,
        "state_bytes": cluster.state_bytes,
        "mtbf_s": round(mtbf_of(per_day), 1),
        "gpus_per_node": hierarchy.gpus_per_node,
        "nodes_per_rack": hierarchy.nodes_per_rack,
        "failures_per_day": {domain.value: round(rate, 6) for domain, rate in per_day.items()},
        "bytes_per_s": {source.value: rate for source, rate in READING.items()},
        "goodput": _goodputs(with_ranks),
        "free": _goodputs(without),
        "restarts": {
            source.value: _mean([found[ARMS[0]] for found in with_ranks], source)
            for source in Source
        },
    }


def _runs(
    size: AtSize,
    cluster: Cluster,
    *,
    seed: int,
    fixed_s: float,
    bound: float,
    days: float | None,
) -> dict[str, Recovered]:
    hierarchy = cluster.hierarchy
    restarts = Restarts(
        storage=cluster.storage,
        state_bytes=cluster.state_bytes,
        fixed_s=fixed_s,
        num_gpus=size.num_gpus,
        gpus_per_node=hierarchy.gpus_per_node,
        planning_s=size.planning_s,
    )
    found = compare_recoveries(
        size,
        hierarchy=hierarchy,
        restarts=restarts,
        max_overhead=bound,
        days=days,
        seed=seed,
        names=ARMS,
    )
    return {each.arm.name: each.recovered for each in found}


def _goodputs(runs: list[dict[str, Recovered]]) -> dict[str, float]:
    return {arm: round(median(found[arm].outcome.goodput for found in runs), 5) for arm in ARMS}


def _mean(runs: list[Recovered], source: Source) -> Line:
    """Of the restarts from one source, over all runs."""
    returns = [found.returns[source] for found in runs]
    count = sum(each.count for each in returns)
    days = sum(found.outcome.wall_s for found in runs) / _DAY_S
    return {
        "per_day": round(count / days, 4),
        "takes_s": round(sum(each.down_s for each in returns) / max(1, count), 2),
        "lost_s": round(sum(each.lost_s for each in returns) / max(1, count), 2),
    }
