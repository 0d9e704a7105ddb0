"""Goodput by number of GPUs, simulated from measured costs and published failure rates.

    python -m benchmarks.goodput

Goodput is the fraction of all time that becomes progress. Nothing is measured here: the time of an
iteration (``iteration_s``), of a checkpoint (``cost_s``) until it is durable (``durable_s``), and
of a restart (``restart_s``, from a failure until training continues, restore included) are read
from the newest committed lines of other benchmarks. Every line names these, with their commit and
machine (``figures``). ``--cost-s`` and similar options override them; ``--setting example`` uses
iterations of 1 s, checkpoints of 1 s, durable after 11 s, and restarts of 2 min. A missing figure
is an error. ``--notice-s`` is added to a restart: the time until a failure is noticed and machines
are available, which cannot be measured on one machine.

Arms: ``bound``, always the smallest interval within 3.5 %; ``fixed``, every 30 minutes; ``young``
and ``daly``, the closed forms; ``auto``, checkfreq without a failure rate, ``auto mtbf_s`` with
it, ``auto goodput`` for the least waste; ``paper, formula`` and ``paper, budget``, the paper's
policies (lab/paper_policy.py). Medians over ``--seeds`` runs of a thousand failures, which all
arms share; ``low`` and ``high`` are the quartiles.

``ranks``: what one meeting, the commit and the planning of a restore take at this size, from
functions fitted to measured points (``--rank-costs``; none: nothing), and how far beyond these the
size is. Given ``--state-bytes``, which the example does, failures of processes, nodes and racks are
told apart too (recovery.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.goodput.inputs import Figure, Missing, Source, in_seconds, measured
from benchmarks.goodput.recovery import Cluster as Recovering
from benchmarks.goodput.recovery import report_recovery
from benchmarks.lab.estimate import quartiles
from benchmarks.lab.paper_policy import Rule, paper_decider
from benchmarks.lab.record import emit
from benchmarks.lab.results import RESULTS
from benchmarks.lab.tables import Line
from checkfreq.simulation import Cluster, Costs, Exponential, Rate, simulate, steady
from checkfreq.simulation.comparison import Arm, compare
from checkfreq.simulation.meeting import meeting, with_meetings, without_meetings
from checkfreq.simulation.rank_costs import FREE, RankCosts, default_rank_costs, read_rank_costs
from checkfreq.simulation.restarts import Storage
from checkfreq.simulation.sizes import AtSize, at_size

SIZES = (8, 64, 512, 1_024, 4_096, 16_384, 100_000)
FIGURES = ("iteration_s", "cost_s", "durable_s", "restart_s")
BOUND = 0.035
EXAMPLE = {"iteration_s": 1.0, "cost_s": 1.0, "durable_s": 11.0, "restart_s": 120.0}
#: Of 405e9 parameters: 14 bytes each, a weight and two moments in 32 bits and a copy in 16.
EXAMPLE_BYTES = 5_670_000_000_000

#: The costs of a training, all from one line: figures of different trainings do not combine.
COSTS = (
    Source(
        "paper",
        "python -m benchmarks.paper",
        lambda line: line["arm"] == "auto",
        {
            "iteration_s": in_seconds("iteration_ms"),
            "cost_s": in_seconds("cost_ms"),
            "durable_s": in_seconds("durable_s"),
        },
    ),
    Source(
        "frequency",
        "python -m benchmarks.frequency",
        lambda line: line["what"] == "arm" and line["arm"] == "checkfreq",
        {
            "iteration_s": in_seconds("iteration_ms"),
            "cost_s": in_seconds("cost_ms"),
            "durable_s": in_seconds("durable_ms"),
        },
    ),
    Source(
        "overhead",
        "python -m benchmarks.overhead",
        lambda line: line["arm"] in ("auto", "live") and line["bound"] == BOUND,
        {name: in_seconds(name) for name in ("iteration_s", "cost_s", "durable_s")},
    ),
)
RESTARTS = (
    Source(
        "interruptions",
        "python -m benchmarks.interruptions",
        lambda line: line["arm"] == "auto",
        {"restart_s": in_seconds("resume_s")},
    ),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """The figures of the simulated training, and the model they belong to, if any."""

    name: str
    figures: Mapping[str, Figure]
    model: str | None = None

    def costs(self) -> Costs:
        """Training stops for the full cost of a checkpoint and is otherwise not slowed down."""
        cost_s = self.figures["cost_s"].value
        return Costs(
            iteration_s=self.figures["iteration_s"].value,
            stall_s=cost_s,
            copy_s=cost_s,
            persist_s=max(0.0, self.figures["durable_s"].value - cost_s),
        )


def main() -> None:
    """Print one line per number of GPUs."""
    args = _arguments()
    try:
        setting = setting_of(args)
    except Missing as missing:
        raise SystemExit(f"goodput: {missing}") from None
    rank_costs = rank_costs_of(args.rank_costs)
    state_bytes = args.state_bytes
    if state_bytes is None and args.setting == "example":
        state_bytes = EXAMPLE_BYTES
    for num_gpus in args.gpus:
        print(f"goodput: {num_gpus} GPUs", file=sys.stderr, flush=True)
        size = at_size(setting.costs(), num_gpus, rank_costs=rank_costs, max_overhead=BOUND)
        report(setting, size, rank_costs, args)
        for storage in Storage if state_bytes is not None else ():
            cluster = Recovering(storage, state_bytes, Rate[args.rate.upper()])
            _report_recovery(setting, size, cluster, rank_costs, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", default=SIZES, help="that one failure stops")
    add("--rate", choices=[rate.name.lower() for rate in Rate], default="research")
    add("--setting", choices=["measured", "example"], default="measured")
    add("--model", help="the training whose measured costs to take (default: the newest)")
    for name in FIGURES:
        add(f"--{name.replace('_', '-')}", type=float, metavar="S", help="instead of the measured")
    add("--notice-s", type=float, default=0.0, metavar="S", help="of each failure, before restarts")
    add("--interval-s", type=float, default=1800.0, metavar="S", help="of the arm `fixed`")
    add("--rank-costs", metavar="FILE|none", help="points (default: those of the package)")
    add("--state-bytes", type=int, metavar="N", help="of all ranks, that a restart reads")
    add("--seeds", type=int, default=4, help="runs of each arm")
    add("--days", type=float, help="of each run (default: enough for a thousand failures)")
    add("--results", type=Path, default=RESULTS, help="the folder of the lines to read")
    return parser.parse_args()


# What is simulated


def setting_of(args: argparse.Namespace) -> Setting:
    """The figures given as options, completed from result lines or from the example."""
    given = {
        name: Figure(value, "given")
        for name in FIGURES
        if (value := getattr(args, name)) is not None
    }
    if args.setting == "example":
        example = {name: Figure(value, "example") for name, value in EXAMPLE.items()}
        return Setting("example", {**example, **given})
    figures, model = dict(given), args.model
    for sources in (COSTS, RESTARTS):
        if not given.keys() >= sources[0].figures.keys():
            found, line = measured(sources, args.results, model=_model_of(sources, args))
            figures = {**found, **figures}
            model = line.get("model") if sources is COSTS else model
    return Setting("measured", figures, model)


def _model_of(sources: tuple[Source, ...], args: argparse.Namespace) -> str | None:
    """Most of a restart is starting the process, so it may come from a different model."""
    return args.model if sources is COSTS else None


def rank_costs_of(given: str | None) -> RankCosts:
    """The points of the package, of a file, or none."""
    if given == "none":
        return FREE
    return default_rank_costs() if given is None else read_rank_costs(Path(given))


# Results


def report(setting: Setting, size: AtSize, rank_costs: RankCosts, args: argparse.Namespace) -> None:
    """One line for one number of GPUs."""
    mtbf_s = Cluster(size.num_gpus, Rate[args.rate.upper()]).mtbf_s
    restart_s = setting.figures["restart_s"].value + args.notice_s + size.planning_s
    runs = [list(arms(size, mtbf_s, restart_s, args, seed=seed)) for seed in range(args.seeds)]
    emit(
        "goodput",
        what="arms",
        **_inputs(setting, size, rank_costs, args),
        mtbf_s=round(mtbf_s, 1),
        failures=sum(each[0].outcome.num_failures for each in runs),
        **summary(runs),
    )


def _report_recovery(
    setting: Setting,
    size: AtSize,
    cluster: Recovering,
    rank_costs: RankCosts,
    args: argparse.Namespace,
) -> None:
    found = report_recovery(
        size,
        setting.costs(),
        cluster,
        fixed_s=setting.figures["restart_s"].value + args.notice_s,
        bound=BOUND,
        seeds=args.seeds,
        days=args.days,
    )
    emit("goodput", what="recovery", **_inputs(setting, size, rank_costs, args), **found)


def _inputs(
    setting: Setting, size: AtSize, rank_costs: RankCosts, args: argparse.Namespace
) -> Line:
    """What a line was simulated with."""
    return {
        "setting": setting.name,
        "model": setting.model,
        "gpus": size.num_gpus,
        "rate": args.rate,
        **{name: setting.figures[name].value for name in FIGURES},
        "notice_s": args.notice_s,
        "figures": {name: setting.figures[name].origin for name in FIGURES},
        "seeds": args.seeds,
        "ranks": {
            "meeting_s": round(size.meeting_s, 6),
            "meetings": round(size.meetings, 6),
            "commit_s": round(size.commit_s, 6),
            "planning_s": round(size.planning_s, 6),
            "measured": {what: fit.largest for what, fit in rank_costs.fits.items()},
            "deviation": {what: round(fit.worst, 3) for what, fit in rank_costs.fits.items()},
        },
    }


def arms(
    size: AtSize, mtbf_s: float, restart_s: float, args: argparse.Namespace, *, seed: int
) -> Iterator[Arm]:
    """All arms, on the same failures."""
    costs, boundary_s = size.costs, size.boundary_s
    yield from compare(
        costs,
        mtbf_s=mtbf_s,
        restart_s=restart_s,
        interval_s=args.interval_s,
        max_overhead=BOUND,
        days=args.days,
        seed=seed,
        boundary_s=boundary_s,
    )
    for rule in Rule:
        decider = paper_decider(rule, max_overhead=BOUND, known=costs.profile())
        outcome = simulate(
            steady(with_meetings(costs, boundary_s)),
            meeting(decider, boundary_s),
            wall_s=1000 * mtbf_s if args.days is None else args.days * 86_400,
            failures=Exponential(mtbf_s),
            restart_s=restart_s,
            seed=seed,
            max_overhead=BOUND,
        )
        yield Arm(rule.value, without_meetings(outcome, costs, boundary_s))


def summary(runs: list[list[Arm]]) -> Line:
    """Per arm: goodput with its quartiles, the interval in steps, and whether it is limited."""
    by_name: dict[str, list[Arm]] = {}
    for arm in (arm for each in runs for arm in each):
        by_name.setdefault(arm.name, []).append(arm)
    goodputs = {name: [arm.outcome.goodput for arm in each] for name, each in by_name.items()}
    return {
        "goodput": {name: round(median(values), 5) for name, values in goodputs.items()},
        "low": {name: round(quartiles(values)[0], 5) for name, values in goodputs.items()},
        "high": {name: round(quartiles(values)[1], 5) for name, values in goodputs.items()},
        "interval_steps": {name: each[0].interval_steps for name, each in by_name.items()},
        "limited": [name for name, each in by_name.items() if each[0].is_limited],
    }
