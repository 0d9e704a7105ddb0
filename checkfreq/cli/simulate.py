"""``checkfreq simulate``: the goodput of a simulated run, for several ways to set the interval.

With ``--trace`` the policies are replayed over a recorded run instead (replaying.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from checkfreq.cli import simulate_tables
from checkfreq.cli.arguments import example, json_option
from checkfreq.cli.run_options import (
    GPUS,
    max_overhead_option,
    numbers,
    rate_of,
    rate_option,
    seconds,
)
from checkfreq.cli.simulate_options import ClusterGiven, cluster_options
from checkfreq.cli.simulate_tables import Row
from checkfreq.errors import ConfigError
from checkfreq.simulation import Cluster, Costs
from checkfreq.simulation.comparison import Arm, compare
from checkfreq.simulation.failures import Rate
from checkfreq.simulation.rank_costs import FREE, RankCosts
from checkfreq.simulation.recovery import Recovered
from checkfreq.simulation.sizes import AtSize, at_size, compare_recoveries, mtbf_of

#: Without a trace these say what the run costs.
_REQUIRED = ("iteration_s", "cost_s", "persist_s", "restart_s")
#: What can be given besides one.
_BESIDE_TRACE = {"max_overhead", "mtbf_s", "interval_s"}


@click.command(
    "simulate",
    epilog=example(
        "checkfreq simulate --iteration-s 0.5 --cost-s 0.05 --persist-s 10 --restart-s 120 "
        "--gpus 8,1024",
        "checkfreq simulate --iteration-s 0.5 --cost-s 0.05 --persist-s 10 --restart-s 120 "
        "--gpus 16384 --storage own --state-bytes 6TB",
        "checkfreq simulate --trace chk/ --every 10,50",
    ),
)
@seconds("--iteration-s", "Seconds per iteration.", metavar="T")
@seconds("--cost-s", "Seconds that a checkpoint adds to training.")
@seconds("--persist-s", "Seconds until it is durable, in the background.")
@seconds(
    "--restart-s",
    "Seconds from a failure until training continues (but for reading the state, with --storage).",
)
@click.option("--gpus", type=GPUS, metavar="N[,N...]", help="GPUs that one failure stops.")
@rate_option("Cluster whose published failure rate is used, with --gpus (default: research).")
@seconds("--mtbf-s", "Seconds between failures, instead of --gpus and --rate.")
@max_overhead_option
@seconds(
    "--interval-s",
    "Seconds of work between checkpoints, for the fixed interval.",
    default=1800.0,
    show_default=True,
)
@click.option(
    "--days",
    type=float,
    metavar="D",
    help="Length of the run (default: enough for 1000 failures).",
)
@cluster_options
@click.option("--seed", type=int, default=0, metavar="N", help="Of the failures.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE|DIR",
    help="Replay over a recorded run instead: its trace.jsonl, or its directory.",
)
@click.option(
    "--every",
    type=numbers(int, "10,50"),
    metavar="K[,K...]",
    help="Fixed intervals in iterations, with --trace.",
)
@json_option
@click.pass_context
def command(context: click.Context, /, as_json: bool, **given: Any) -> int:
    """Simulate a training run with failures, for several ways to choose the interval.

    Prints one line for each size of cluster and way to choose. What ranks cost one another grows
    with their number: functions fitted to measured points, which are shown with their fit. With
    --storage, failures of processes, nodes and racks are told apart: a run restarts from memory,
    from its nodes' disks or from shared storage. With --trace, replays the ways over the
    iterations and checkpoints that a run recorded (CFConfig(record_trace=True)): the interval over
    time, its overhead and the work at risk, beside the smallest interval that keeps the bound.
    """
    named = {name for name in given if _is_given(context, name)}
    trace, every = given.pop("trace"), given.pop("every")
    if trace is not None:
        _require_no_others(named)
        return _replay(trace, every or [], {name: given[name] for name in named & _BESIDE_TRACE},
                       as_json=as_json)  # fmt: skip
    _require_all(context, named)
    cluster = ClusterGiven(**{each.name: given.pop(each.name) for each in fields(ClusterGiven)})
    args = Given(**given)
    _require_one_rate(args)
    cluster.check(named, gpus=args.gpus, mtbf_s=args.mtbf_s)
    if args.days is not None and not args.days > 0:
        raise ConfigError(f"--days: expected more than 0, got {args.days}")
    rank_costs = cluster.costs() if args.gpus is not None else FREE
    rows = _rows(args, cluster, rank_costs)
    if as_json:
        for row in rows:
            print(json.dumps(row), flush=True)
        return 0
    for line in simulate_tables.lines(list(rows), rank_costs, max_overhead=args.max_overhead):
        print(line)
    return 0


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _require_no_others(named: set[str]) -> None:
    """What a trace has measured, or has no failures for, cannot be given as well."""
    others = sorted(map(_option, named - _BESIDE_TRACE - {"trace", "every"}))
    if others:
        raise ConfigError(
            f"--trace says what the run costs: expected no {', '.join(others)} beside it (only "
            f"--every, {', '.join(sorted(map(_option, _BESIDE_TRACE)))})"
        )


def _require_all(context: click.Context, named: set[str]) -> None:
    if "every" in named:
        raise ConfigError("--every is for a recorded run: give --trace too, or --interval-s")
    for param in context.command.params:
        if param.name in _REQUIRED and param.name not in named:
            raise click.MissingParameter("Or --trace.", ctx=context, param=param)


def _replay(trace: Path, every: list[int], given: dict[str, Any], *, as_json: bool) -> int:
    from checkfreq.cli.replaying import replayed, show

    known = {name: given.get(name) for name in _BESIDE_TRACE}
    show(replayed(trace, every=every, **known), as_json=as_json)
    return 0


@dataclass(frozen=True, slots=True)
class Given:
    """The options: what the run costs, and how often it fails."""

    iteration_s: float
    cost_s: float
    persist_s: float
    restart_s: float
    gpus: list[int] | None
    rate: str | None
    mtbf_s: float | None
    max_overhead: float
    interval_s: float
    days: float | None
    seed: int


def _require_one_rate(args: Given) -> None:
    if args.mtbf_s is None and args.gpus is None:
        raise ConfigError("how often does the run fail? Give --gpus, or --mtbf-s")
    if args.mtbf_s is not None and args.gpus is not None and len(args.gpus) > 1:
        raise ConfigError("--mtbf-s is that of one size of cluster: give one number of --gpus")


def _rows(args: Given, cluster: ClusterGiven, rank_costs: RankCosts) -> Iterator[Row]:
    costs = Costs(
        iteration_s=args.iteration_s,
        stall_s=args.cost_s,
        copy_s=args.cost_s,
        persist_s=args.persist_s,
    )
    rate = rate_of(args.rate, mtbf_s=args.mtbf_s)
    sizes: Sequence[int | None] = args.gpus or [None]
    for num_gpus in sizes:
        size = at_size(costs, num_gpus or 1, rank_costs=rank_costs, max_overhead=args.max_overhead)
        if cluster.storage is None:
            yield from _alike(args, size, rate, num_gpus=num_gpus, rank_costs=rank_costs)
        else:
            yield from _recovering(args, size, rate, cluster, rank_costs=rank_costs)


def _alike(
    args: Given, size: AtSize, rate: Rate, *, num_gpus: int | None, rank_costs: RankCosts
) -> Iterator[Row]:
    """All failures are alike: each goes back to the newest durable checkpoint."""
    mtbf_s = args.mtbf_s
    if num_gpus is not None:
        of_size_s = Cluster(num_gpus, rate).mtbf_s
        mtbf_s = of_size_s if mtbf_s is None else mtbf_s
    assert mtbf_s is not None, "one of the two was given"
    arms = compare(
        size.costs,
        mtbf_s=mtbf_s,
        restart_s=args.restart_s + size.planning_s,
        max_overhead=args.max_overhead,
        interval_s=args.interval_s,
        days=args.days,
        seed=args.seed,
        boundary_s=size.boundary_s,
    )
    for arm in arms:
        row = {"gpus": num_gpus, "mtbf_s": mtbf_s, **_row(arm, size)}
        yield row if num_gpus is None else {**row, "ranks": _ranks(size, rank_costs)}


def _recovering(
    args: Given, size: AtSize, rate: Rate, cluster: ClusterGiven, *, rank_costs: RankCosts
) -> Iterator[Row]:
    """Failures of processes, nodes and racks, with restarts by source."""
    hierarchy = cluster.hierarchy(rate, mtbf_s=args.mtbf_s, num_gpus=size.num_gpus)
    per_day = hierarchy.at(size.num_gpus)
    arms = compare_recoveries(
        size,
        hierarchy=hierarchy,
        restarts=cluster.restarts(size, fixed_s=args.restart_s),
        max_overhead=args.max_overhead,
        interval_s=args.interval_s,
        days=args.days,
        seed=args.seed,
    )
    for each in arms:
        yield {
            "gpus": size.num_gpus,
            "mtbf_s": mtbf_of(per_day),
            **_row(each.arm, size),
            "ranks": _ranks(size, rank_costs),
            "storage": cluster.storage,
            "failures_per_day": {domain.value: rate for domain, rate in per_day.items()},
            "restarts": _restarts(each.recovered),
        }


def _row(arm: Arm, size: AtSize) -> Row:
    outcome, steps = arm.outcome, arm.interval_steps
    met_s = size.meetings * (outcome.progress_s + outcome.lost_s)
    return {
        "arm": arm.name,
        "interval_steps": steps,
        "interval_s": None if steps is None else steps * size.costs.iteration_s,
        "limited": arm.is_limited,
        "overhead": outcome.overhead,
        "meetings_of_work": size.meetings,
        "goodput": outcome.goodput,
        "checkpoints": (outcome.overhead_s - met_s) / outcome.wall_s,
        "meetings": met_s / outcome.wall_s,
        "lost": outcome.lost_s / outcome.wall_s,
        "restarting": outcome.down_s / outcome.wall_s,
        "failures": outcome.num_failures,
        "days": outcome.wall_s / 86_400,
    }


def _ranks(size: AtSize, rank_costs: RankCosts) -> Row:
    """What ranks cost one another at this size; ``beyond`` above 1 is extrapolated."""
    return {
        what: {
            "seconds": rank_costs.seconds(what, size.num_gpus),
            "worst_deviation": fit.worst,
            "beyond": fit.beyond(size.num_gpus),
        }
        for what, fit in rank_costs.fits.items()
    }


def _restarts(recovered: Recovered) -> Row:
    """By source: how often, and on average how long a restart takes and what it loses."""
    total = sum(found.count for found in recovered.returns.values())
    days = recovered.outcome.wall_s / 86_400
    return {
        source.value: {
            "restarts": found.count,
            "per_day": found.count / days,
            "share": found.count / max(1, total),
            "takes_s": found.down_s / max(1, found.count),
            "lost_s": found.lost_s / max(1, found.count),
        }
        for source, found in recovered.returns.items()
    }
