"""The benchmark suite.

python -m benchmarks                          list the benchmarks
python -m benchmarks run                      run all of them on the CPU
python -m benchmarks run compare frequency    run these
python -m benchmarks run --longer             run those that are not in the suite

``run`` appends result lines and rewrites the tables and plots of the pages.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import suite
from benchmarks.suite import Call, Outcome
from checkfreq.examples.imagenet.options import is_installed


def main(argv: Sequence[str] | None = None) -> int:
    """List the benchmarks or run them; returns 1 if one failed."""
    args = _arguments(argv)
    if args.action == "list":
        print(listing(suite.ON_CPU, "make bench, on a CPU"))
        print(listing(suite.LONGER, "python -m benchmarks run --longer, on a CPU"))
        return 0
    budget_s = None if args.minutes is None else 60 * args.minutes
    try:
        outcomes = suite.run_all(args.calls, results=args.results, budget_s=budget_s)
    finally:
        if args.results.resolve() == suite.RESULTS:
            _write_pages()
    print(ended(outcomes), file=sys.stderr)
    return int(any(outcome.status for outcome in outcomes))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(action="list")
    run = parser.add_subparsers().add_parser("run", help="run benchmarks")
    _add_run_options(run)
    args = parser.parse_args(argv)
    if args.action == "run":
        try:
            args.calls = suite.chosen(suite.LONGER if args.longer else suite.ON_CPU, args.names)
        except ValueError as error:
            run.error(str(error))
    return args


def _add_run_options(run: argparse.ArgumentParser) -> None:
    run.set_defaults(action="run")
    run.add_argument("names", nargs="*", metavar="NAME", help="only these benchmarks of the suite")
    run.add_argument("--longer", action="store_true", help="benchmarks that are not in the suite")
    run.add_argument("--minutes", type=float, help="skip benchmarks that would not finish in time")
    run.add_argument(
        "--results",
        type=Path,
        default=suite.RESULTS,
        help="where to append the lines; pages are rewritten only for benchmarks/results",
    )


def listing(calls: Sequence[Call], title: str) -> str:
    """What each call measures, how long it takes, and its command."""
    minutes = sum(call.seconds for call in calls) / 60
    lines = [f"{title}: about {minutes:.0f} minutes in all"]
    for call in calls:
        lines += [f"  {suite.summary(call.name)}", f"    {call.command}  (~{call.seconds:.0f} s)"]
    return "\n".join([*lines, ""])


def ended(outcomes: Sequence[Outcome]) -> str:
    """A line per call."""
    return "\n".join(f"{_ended(outcome):>12}  {outcome.call.command}" for outcome in outcomes)


def _ended(outcome: Outcome) -> str:
    if outcome.seconds is None:
        return "skipped"
    if outcome.status == suite.OVERRAN:
        return "overran"
    return f"status {outcome.status}" if outcome.status else f"{outcome.seconds:.0f} s"


def _write_pages() -> None:
    from benchmarks.plots import draw_all
    from benchmarks.tables import write_pages

    write_pages()
    if is_installed("matplotlib"):
        draw_all()
    else:
        print("plots are not redrawn: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
