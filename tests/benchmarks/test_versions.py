"""The core of the tests is run with each pair of Python and torch, and counted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.lab.results import ROOT
from benchmarks.tables import with_tables
from benchmarks.versions.environments import PAIRS, interpreter_of
from benchmarks.versions.measure import CORE, LEFT_OUT, WITHOUT_TORCH, Outcome, outcome_of, run
from tests.acceptance.cases import CASES

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="fails"><failure/></testcase>
<testcase classname="tests.a" name="fails"><error/></testcase>
<testcase classname="tests.a" name="is_left_out"><skipped/></testcase>
</testsuite></testsuites>"""


def line(python: str, torch: str, **fields: Any) -> str:
    counted = {"passed": 1204, "failed": [], "benchmark": "versions", **fields}
    machine = {"cores": 2, "accelerator": None}
    versions = {"python": python, "torch": torch}
    return json.dumps({**counted, "machine": machine, "versions": versions}) + "\n"


def test_every_part_of_the_core_exists() -> None:
    for part in (*CORE, *WITHOUT_TORCH):
        path, _, case = part.partition("::")
        assert (ROOT / path).exists(), part
        assert not case or case.partition("[")[2].rstrip("]") in CASES, part
    for path in LEFT_OUT:
        assert (ROOT / path).is_file(), path
        assert path.rpartition("/")[0] in (*CORE, *WITHOUT_TORCH), path


def test_outcomes_are_counted_and_failures_named() -> None:
    assert outcome_of(REPORT) == Outcome(1, 1, ("tests.a.fails",))
    assert outcome_of(None) == Outcome(0, 0, ("pytest",))


def test_tests_are_run_with_this_interpreter() -> None:
    found = run(["tests/packages/test_recipe.py"], jobs=0)
    assert found == Outcome(2, 0, ())


def test_the_interpreter_of_a_version_is_found_where_it_runs() -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert interpreter_of(here) is not None
    assert interpreter_of("3.1") is None


def test_the_pairs_are_three_pythons_with_the_oldest_and_the_newest_torch() -> None:
    assert [pair.split("=") for pair in PAIRS] == [
        [python, torch] for python in ("3.10", "3.12", "3.13") for torch in ("2.11.*", "")
    ]


def test_the_table_has_a_row_per_python_and_the_newest_result_of_each_pair(
    tmp_path: Path,
) -> None:
    lines = [
        line("3.13.0", "2.15.0+cu130", passed=7),
        line("3.10.13", "2.11.0+cu130"),
        line("3.13.0", "2.15.0+cu130", failed=["tests.a.fails"]),
    ]
    (tmp_path / "versions.jsonl").write_text("".join(lines))
    text = with_tables("<!-- table versions -->\n<!-- end -->", results=tmp_path)
    assert text.splitlines()[1:-1] == [
        "| tests passed | torch 2.11 | torch 2.15 |",
        "|---|---|---|",
        "| Python 3.10 | 1,204 | - |",
        "| Python 3.13 | - | 1,204, 1 failed |",
    ]
