"""Other libraries' own test suites, with checkfreq in the place of what they test.

    python -m benchmarks.swapped accelerate lightning=CHECKOUT torchdata=CHECKOUT dcp=CHECKOUT \
        transformers=CHECKOUT

Each suite runs with a pytest plugin that swaps ours in. A test failed by design if its error is one
of those that `SUITES` lists. Files with other failures run again without us: what fails there too
is the suite's own (it may be of another version), and the rest failed because of us. The sdist of
accelerate has its tests; of the others take a checkout of the installed version, and install what
its tests import. It exits with 1 if a test failed because of us.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from benchmarks.lab.record import emit
from benchmarks.lab.results import ROOT

#: Sdists that were unpacked.
UNPACKED = ROOT / "build" / "swapped"

#: Suites whose plugin does more than to swap ours in.
PLUGIN_WITHOUT_US = ("dcp", "lightning", "transformers")


@dataclass(frozen=True, slots=True)
class Suite:
    """Files below ``folder`` of a checkout, and why some tests fail by design.

    ``by_design`` maps a regular expression for the error's text to the reason.
    """

    package: str
    folder: str
    files: Sequence[str]
    options: Sequence[str] = ()
    by_design: dict[str, str] = field(default_factory=dict)
    in_sdist: bool = False


SUITES = {
    "accelerate": Suite("accelerate", "tests", ["test_state_checkpointing.py"], in_sdist=True),
    "lightning": Suite(
        "lightning",
        "tests",
        [
            f"tests_pytorch/{name}.py"
            for name in (
                *("models/test_restore", "checkpointing/test_trainer_checkpoint"),
                *("loops/test_loops", "loops/test_training_loop", "loops/test_loop_state_dict"),
            )
        ],
        by_design={
            "is not a loader whose place can be saved": "data that is no loader is refused",
            "overrides DataLoader._get_iterator": "a loader that serves in its own way is refused",
            "training reads [0-9]+ loaders": "several loaders in training are refused",
        },
    ),
    "torchdata": Suite(
        "torchdata",
        "test",
        ["stateful_dataloader/test_state_dict.py"],
        by_design={
            "order of the custom sampler": "a sampler whose order cannot be entered is refused",
            "with in_order=False": "batches that overtake one another are refused",
            "KeyError: '(_snapshot|dataset_state)": "reads the keys of torchdata's own state",
            "Expected 0 but got 100": "after its last batch an epoch has no empty rest to serve",
            "ValueError not raised": "workers start at the first batch, not at iter()",
            "Expected AssertionError to be thrown": "another number of workers is taken",
            "Expected -1 but got 0": "each epoch starts with the training process's own dataset",
        },
    ),
    "transformers": Suite(
        "transformers",
        ".",
        ["tests/trainer/test_trainer.py"],
        options=["-k", "resum"],
        by_design={"auto_find_batch_size=True cannot": "a batch size that is found is refused"},
    ),
    "dcp": Suite(
        "torch",
        "test/distributed/checkpoint",
        ["test_file_system_checkpoint_cpu.py", "test_dtensor_checkpoint.py"],
    ),
}


def main() -> None:
    """One result line for each suite."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swapped", description=__doc__)
    parser.add_argument("suites", nargs="*", default=["accelerate"], metavar="NAME[=CHECKOUT]")
    parser.add_argument("--minutes", type=float, default=20, help="limit of each run of a suite")
    options = parser.parse_args()
    failed = 0
    for given in options.suites:
        name, _, checkout = given.partition("=")
        found = compare(name, Path(checkout) if checkout else sdist_of(name), options.minutes)
        emit("swapped", suite=name, packages=[SUITES[name].package], **found)
        failed += len(found["failed"])
    sys.exit(bool(failed))


def sdist_of(name: str) -> Path:
    """The unpacked sdist of the installed version, downloaded once."""
    suite = SUITES[name]
    if not suite.in_sdist:
        raise SystemExit(f"{name}: its sdist has no tests; pass {name}=CHECKOUT")
    release = f"{suite.package}-{metadata.version(suite.package)}"
    if not (UNPACKED / release).exists():
        UNPACKED.mkdir(parents=True, exist_ok=True)
        (UNPACKED / "pytest.ini").touch()  # else pytest finds the settings of our own tests
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
        wanted = [suite.package, release.replace("-", "==")]
        subprocess.run([*fetch, *wanted], cwd=UNPACKED, check=True)
        subprocess.run(["tar", "xzf", f"{release}.tar.gz"], cwd=UNPACKED, check=True)
    return UNPACKED / release


def compare(name: str, checkout: Path, minutes: float = 20) -> dict[str, object]:
    """What came of the suite: counts, reasons with their counts, and names of what failed."""
    suite = SUITES[name]
    ours = run(name, checkout, suite.files, minutes, is_ours=True)
    reasons = Counter[str]()
    unexplained = {}
    for test, error in ours.items():
        known = (why for text, why in suite.by_design.items() if error and re.search(text, error))
        if reason := next(known, None):
            reasons[reason] += 1
        elif error:
            unexplained[test] = error
    files = [file for file in suite.files if any(_is_in(test, file) for test in unexplained)]
    theirs = run(name, checkout, files, minutes, is_ours=False) if files else {}
    failed = [test for test in unexplained if not theirs.get(test)]
    for test in failed:
        print(f"{test}: {unexplained[test]}", file=sys.stderr)
    return {
        "passed": sum(error == "" for error in ours.values()),
        "skipped": sum(error is None for error in ours.values()),
        "by_design": dict(reasons),
        "fails_without_us": len(unexplained) - len(failed),
        "failed": failed,
    }


def _is_in(test: str, file: str) -> bool:
    return file.removesuffix(".py").replace("/", ".") in test


def run(
    name: str, checkout: Path, files: Sequence[str], minutes: float, *, is_ours: bool
) -> dict[str, str | None]:
    """The errors by test: "" for one that passed, None for one that was skipped."""
    suite = SUITES[name]
    plugin = ["-p", f"benchmarks.swapped.in_{name}"] if is_ours or name in PLUGIN_WITHOUT_US else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CHECKFREQ_SWAPPED": str(int(is_ours)),
    }
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
        command += [*suite.options, f"--junitxml={report}", f"--basetemp={folder}/tests"]
        ended = subprocess.run(
            [*command, *files],
            cwd=checkout / suite.folder,
            env=environment,
            stdout=sys.stderr,
            timeout=60 * minutes,
        )
        if ended.returncode not in (0, 1):  # of pytest: all passed, some failed
            raise SystemExit(f"{name}: its tests could not be run; pytest says why above")
        return _errors(report)


def _errors(report: Path) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        parts = {part.tag: part for part in case}
        failure = parts.get("failure", parts.get("error"))
        if failure is not None:
            found[test] = f"{failure.get('message')}\n{failure.text}"
        else:
            found[test] = None if "skipped" in parts else ""
    return found
