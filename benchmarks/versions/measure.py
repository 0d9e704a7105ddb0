"""Whether the core of the tests passes in this Python, with this torch.

    python -m benchmarks.versions

``make compat`` runs it in an environment for each pair of Python and torch (`environments.py`). The
core is what touches torch, the interpreter and the kernel most: state, restore, the contract of the
manager, the private names that we use, and some runs that are killed and resumed. Store and worker
import no torch: they are tested once on each Python, in the pair that is told so by
``--without-torch``. Files are left out that take long over what no version changes (`LEFT_OUT`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lab.record import emit
from benchmarks.lab.results import ROOT

#: Trainings that are killed and resumed: kinds of state that a version may change.
CASES = (
    "AdamWWarmUpPerStepTwoWorkers",
    "EveryOtherScheduler",
    "GradScalerThatSkipsSteps",
    "LbfgsWithClosure",
    "SparseEmbedding",
    "CompiledModel",
    "DistributedDataParallelOfOneRank",
)
_EXACTNESS = "tests/acceptance/test_same_bits.py::test_interrupted_equals_uninterrupted_bit_for_bit"
CORE = (
    *("tests/state", "tests/restore", "tests/contract", "tests/versions"),
    *(f"{_EXACTNESS}[{name}]" for name in CASES),
)
#: What imports no torch.
WITHOUT_TORCH = ("tests/store", "tests/persist")
#: Waits on clocks (intervals, notices, uploads), failing disks and broken directories, and searches
#: by random histories and power cuts: what they would find is wrong on any version. A third of the
#: time of the folders above.
LEFT_OUT = (
    "tests/contract/test_auto.py",
    "tests/contract/test_directory.py",
    "tests/contract/test_failures.py",
    "tests/contract/test_notices.py",
    "tests/persist/test_mirrored.py",
    "tests/persist/test_linger_mirror.py",
    "tests/store/test_power_cut.py",
    "tests/store/test_joint_power_cut.py",
)
_NOT_MARKED = "not gpu and not more and not slurm and not s3"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What pytest counted; ``failed`` are the names of tests that failed or had an error."""

    passed: int
    skipped: int
    failed: tuple[str, ...]


def main() -> int:
    """Print the line; returns 1 unless all of it passed."""
    args = _arguments()
    began_s = time.monotonic()
    tests = (*CORE, *WITHOUT_TORCH) if args.without_torch else CORE
    outcome = run(tests, jobs=args.jobs)
    emit(
        "versions",
        passed=outcome.passed,
        skipped=outcome.skipped,
        failed=list(outcome.failed),
        seconds=round(time.monotonic() - began_s),
        packages=("numpy",),
    )
    return int(bool(outcome.failed) or not outcome.passed)


def run(tests: Sequence[str], *, jobs: int) -> Outcome:
    """Run the tests with this interpreter; what they print goes to standard error."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTEST_")  # the second: of a pytest that runs this one
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    with tempfile.TemporaryDirectory(prefix="versions-") as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-m", _NOT_MARKED, f"--junit-xml={report}"),
            *("-n", str(jobs), "--dist", "loadfile", "-p", "no:cacheprovider"),
            *(f"--ignore={path}" for path in LEFT_OUT),
            *tests,
        ]
        subprocess.run(command, cwd=ROOT, env={**kept, "OMP_NUM_THREADS": "1"}, stdout=sys.stderr)
        return outcome_of(report.read_text() if report.exists() else None)


def outcome_of(report: str | None) -> Outcome:
    """The counts of a report in JUnit's format; without one, pytest itself has failed."""
    if report is None:
        return Outcome(0, 0, ("pytest",))
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = [x for x in cases if x.find("failure") is not None or x.find("error") is not None]
    skipped = [x for x in cases if x not in failed and x.find("skipped") is not None]
    names = tuple(dict.fromkeys(f"{x.get('classname')}.{x.get('name')}" for x in failed))
    return Outcome(len(cases) - len(failed) - len(skipped), len(skipped), names)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("--jobs", type=int, default=3, help="tests that run at a time")
    parser.add_argument(
        "--without-torch", action="store_true", help="also test what imports no torch"
    )
    return parser.parse_args()
