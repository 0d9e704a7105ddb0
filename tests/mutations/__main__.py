"""Break the order of snapshots in every known way, and show which test notices.

    python -m tests.mutations                  on the fake device and the CPU
    python -m tests.mutations --gpu            on a GPU
    python -m tests.mutations --only keep      breaks whose name contains this
    python -m tests.mutations --group fence    breaks of one group
    python -m tests.mutations --trials broken  only with breaks, or only without: whole

Exits with 1 unless the tests pass without a break and one fails with each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

# Imported before the forks, which then need not do it again.
import numpy  # noqa: F401
import pytest  # noqa: F401
import torch  # noqa: F401
import xxhash  # noqa: F401

from tests.mutations.breaks import BREAKS, GROUPS
from tests.mutations.edits import Break
from tests.mutations.trial import Outcome, copy_checkout, run_tests


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per break."""
    args = _arguments(argv)
    wanted = [one for one in args.among if args.only in one.name]
    chosen = [one for one in wanted if _tests(one, args.gpu)]
    uncaught = 0
    for name, is_as_expected, found in trials(chosen, gpu=args.gpu, which=args.trials):
        uncaught += not is_as_expected
        print(f"{'ok' if is_as_expected else 'NOT CAUGHT':<12}{name}: {found}", flush=True)
    unseen = [one for one in wanted if not _tests(one, args.gpu)]
    for one in unseen:
        print(f"{'not run':<12}{one.name}: {one.why or 'the fake device has its own of this'}")
    print(f"{len(chosen)} breaks, {uncaught} not as expected, {len(unseen)} not run")
    return int(bool(uncaught))


def trials(
    chosen: Sequence[Break], *, gpu: bool, which: str = "all"
) -> Iterator[tuple[str, bool, str]]:
    """(break, whether it is as it should be, what was found); without a break first."""
    if which != "broken":
        everything = list(dict.fromkeys(test for one in chosen for test in _tests(one, gpu)))
        outcome = _tried(None, everything)
        passed = not outcome.failed and not outcome.problem and outcome.num_passed > 0
        yield "no break", passed, f"{outcome.num_passed} passed {_shown(outcome)}".rstrip()
    for one in chosen if which != "whole" else ():
        outcome = _tried(one, _tests(one, gpu))
        yield one.name, bool(outcome.failed), _shown(outcome)


def _tests(one: Break, gpu: bool) -> tuple[str, ...]:
    if not gpu:
        return one.fake or ()
    return () if one.gpu is None else (one.gpu,)


def _tried(one: Break | None, tests: Sequence[str]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        copy_checkout(Path(scratch), breaking=one)
        return run_tests(Path(scratch), _selected(tests))


def _selected(tests: Sequence[str]) -> list[str]:
    """Files as they are; names of tests as an expression over all that need a GPU."""
    are_files = tests[0].endswith(".py")
    return [*tests] if are_files else ["tests/gpu", "-k", " or ".join(tests)]


def _shown(outcome: Outcome) -> str:
    return outcome.problem or ", ".join(outcome.failed)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpu", action="store_true", help="run the tests that need a GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="breaks whose name has this")
    parser.add_argument("--group", choices=GROUPS, help="breaks of this group")
    parser.add_argument(
        "--trials", choices=("all", "broken", "whole"), default="all", help="default: all"
    )
    args = parser.parse_args(argv)
    args.among = BREAKS if args.group is None else GROUPS[args.group]
    return args


if __name__ == "__main__":
    sys.exit(main())
