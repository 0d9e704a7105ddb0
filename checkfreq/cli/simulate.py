"""``checkfreq simulate``: the goodput of a simulated run, for several ways to set the interval."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from checkfreq.cli import text
from checkfreq.errors import ConfigError
from checkfreq.simulation import Cluster, Costs, Rate
from checkfreq.simulation.comparison import Arm, compare

_PARTS = ("goodput", "checkpoints", "lost", "restarting")
_HEAD = ("GPUS", "MTBF", "CHOSEN", "ITERATIONS", "INTERVAL", "OVERHEAD", *map(str.upper, _PARTS))
_NOTES = """\
ITERATIONS, INTERVAL: between two checkpoints; INTERVAL is work without them.
OVERHEAD: added by checkpoints, of the work done (--max-overhead); the rest: of all time."""
_LIMITED = "*: no shorter, or storage would not keep up."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: what the run costs, and how often it fails."""
    add = parser.add_argument
    add("--iteration-s", type=float, required=True, metavar="T", help="seconds per iteration")
    add(
        "--cost-s",
        type=float,
        required=True,
        metavar="S",
        help="seconds that a checkpoint adds to training",
    )
    add(
        "--persist-s",
        type=float,
        required=True,
        metavar="S",
        help="seconds until it is durable, in the background",
    )
    add(
        "--restart-s",
        type=float,
        required=True,
        metavar="S",
        help="seconds from a failure until training continues",
    )
    add("--gpus", type=_sizes, metavar="N[,N...]", help="GPUs that one failure stops")
    add(
        "--rate",
        choices=[rate.name.lower() for rate in Rate],
        help="cluster whose published failure rate is used, with --gpus (default: research)",
    )
    add(
        "--mtbf-s",
        type=float,
        metavar="S",
        help="seconds between failures, instead of --gpus and --rate",
    )
    add(
        "--max-overhead",
        type=float,
        default=0.035,
        metavar="P",
        help="bound, a fraction (default: %(default)s)",
    )
    add(
        "--interval-s",
        type=float,
        default=1800.0,
        metavar="S",
        help="seconds of work between checkpoints, for the fixed interval",
    )
    add(
        "--days",
        type=float,
        metavar="D",
        help="length of the run (default: enough for 1000 failures)",
    )
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="one JSON object per line")


def simulate(args: argparse.Namespace) -> int:
    """Print one line for each size of cluster and way to choose the interval."""
    _require_one_rate(args)
    if args.days is not None and not args.days > 0:
        raise ConfigError(f"--days: expected more than 0, got {args.days}")
    rows = _rows(args)
    if args.json:
        for row in rows:
            print(json.dumps(row), flush=True)
        return 0
    found = list(rows)
    print(text.table(_HEAD, [_cells(row) for row in found]))
    print(f"\n{_NOTES}")
    if any(row["limited"] for row in found):
        print(_LIMITED)
    return 0


def _require_one_rate(args: argparse.Namespace) -> None:
    if args.mtbf_s is None and args.gpus is None:
        raise ConfigError("how often does the run fail? Give --gpus, or --mtbf-s")
    if args.mtbf_s is not None and args.rate is not None:
        raise ConfigError("--rate and --mtbf-s both say how often the run fails: give one of them")
    if args.mtbf_s is not None and args.gpus is not None and len(args.gpus) > 1:
        raise ConfigError("--mtbf-s is that of one size of cluster: give one number of --gpus")


def _rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    costs = Costs(
        iteration_s=args.iteration_s,
        stall_s=args.cost_s,
        copy_s=args.cost_s,
        persist_s=args.persist_s,
    )
    rate = Rate[(args.rate or "research").upper()]
    for num_gpus in args.gpus or [None]:
        mtbf_s = args.mtbf_s
        if num_gpus is not None:
            of_size_s = Cluster(num_gpus, rate).mtbf_s
            mtbf_s = of_size_s if mtbf_s is None else mtbf_s
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


def _sizes(given: str) -> list[int]:
    """``8,64,1024``."""
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers such as 8,64,1024, got {given!r}"
        ) from None
