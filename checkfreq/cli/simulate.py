"""``checkfreq simulate``: the goodput of a simulated run, for several ways to set the interval.

With ``--trace`` the policies are replayed over a recorded run instead (replaying.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from checkfreq.cli import text
from checkfreq.cli.arguments import example, json_option
from checkfreq.cli.run_options import (
    GPUS,
    max_overhead_option,
    numbers,
    rate_of,
    rate_option,
    seconds,
)
from checkfreq.errors import ConfigError
from checkfreq.simulation import Cluster, Costs
from checkfreq.simulation.comparison import Arm, compare

_PARTS = ("goodput", "checkpoints", "lost", "restarting")
_HEAD = ("GPUS", "MTBF", "CHOSEN", "ITERATIONS", "INTERVAL", "OVERHEAD", *map(str.upper, _PARTS))
_NOTES = """\
ITERATIONS, INTERVAL: between two checkpoints; INTERVAL is work without them.
OVERHEAD: added by checkpoints, of the work done (--max-overhead); the rest: of all time."""
#: Without a trace these say what the run costs.
_REQUIRED = ("iteration_s", "cost_s", "persist_s", "restart_s")
#: What can be given besides one.
_BESIDE_TRACE = {"max_overhead", "mtbf_s", "interval_s"}
_LIMITED = "*: no shorter, or storage would not keep up."


@click.command(
    "simulate",
    epilog=example(
        "checkfreq simulate --iteration-s 0.5 --cost-s 0.05 --persist-s 10 --restart-s 120 "
        "--gpus 8,1024",
        "checkfreq simulate --trace chk/ --every 10,50",
    ),
)
@seconds("--iteration-s", "Seconds per iteration.", metavar="T")
@seconds("--cost-s", "Seconds that a checkpoint adds to training.")
@seconds("--persist-s", "Seconds until it is durable, in the background.")
@seconds("--restart-s", "Seconds from a failure until training continues.")
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

    Prints one line for each size of cluster and way to choose. With --trace, replays them over the
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
    args = Given(**given)
    _require_one_rate(args)
    if args.days is not None and not args.days > 0:
        raise ConfigError(f"--days: expected more than 0, got {args.days}")
    rows = _rows(args)
    if as_json:
        for row in rows:
            print(json.dumps(row), flush=True)
        return 0
    found = list(rows)
    print(text.table(_HEAD, [_cells(row) for row in found]))
    print(f"\n{_NOTES}")
    if any(row["limited"] for row in found):
        print(_LIMITED)
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


def _rows(args: Given) -> Iterator[dict[str, object]]:
    costs = Costs(
        iteration_s=args.iteration_s,
        stall_s=args.cost_s,
        copy_s=args.cost_s,
        persist_s=args.persist_s,
    )
    rate = rate_of(args.rate, mtbf_s=args.mtbf_s)
    sizes: Sequence[int | None] = args.gpus or [None]
    for num_gpus in sizes:
        mtbf_s = args.mtbf_s
        if num_gpus is not None:
            of_size_s = Cluster(num_gpus, rate).mtbf_s
            mtbf_s = of_size_s if mtbf_s is None else mtbf_s
        assert mtbf_s is not None, "one of the two was given"
        arms = compare(
            costs,
            mtbf_s=mtbf_s,
            restart_s=args.restart_s,
            max_overhead=args.max_overhead,
            interval_s=args.interval_s,
            days=args.days,
            seed=args.seed,
        )
        for arm in arms:
            yield {"gpus": num_gpus, "mtbf_s": mtbf_s, **_row(arm, args.iteration_s)}


def _row(arm: Arm, iteration_s: float) -> dict[str, object]:
    outcome, steps = arm.outcome, arm.interval_steps
    return {
        "arm": arm.name,
        "interval_steps": steps,
        "interval_s": None if steps is None else steps * iteration_s,
        "limited": arm.is_limited,
        "overhead": outcome.overhead,
        "goodput": outcome.goodput,
        "checkpoints": outcome.overhead_s / outcome.wall_s,
        "lost": outcome.lost_s / outcome.wall_s,
        "restarting": outcome.down_s / outcome.wall_s,
        "failures": outcome.num_failures,
        "days": outcome.wall_s / 86_400,
    }


def _cells(row: dict[str, object]) -> list[str]:
    steps, interval_s = row["interval_steps"], row["interval_s"]
    return [
        str(row["gpus"] or "-"),
        _span(float(str(row["mtbf_s"]))),
        str(row["arm"]),
        f"{steps or '-'}{'*' if row['limited'] else ''}",
        "-" if interval_s is None else _span(float(str(interval_s))),
        *(f"{100 * float(str(row[name])):.2f} %" for name in ("overhead", *_PARTS)),
    ]


def _span(seconds: float) -> str:
    """``18 min``, ``3.1 h``, ``12.0 d``."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
