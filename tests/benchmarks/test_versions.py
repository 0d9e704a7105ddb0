"""The core of the tests is run with each pair of Python and torch, and counted."""

from __future__ import annotations

from benchmarks.lab.results import ROOT
from benchmarks.versions.measure import CORE, LEFT_OUT, WITHOUT_TORCH, Outcome, outcome_of
from tests.acceptance.cases import CASES

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="passes"/>
<testcase classname="tests.a" name="fails"><failure/></testcase>
<testcase classname="tests.a" name="fails"><error/></testcase>
<testcase classname="tests.a" name="is_left_out"><skipped/></testcase>
</testsuite></testsuites>"""


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
