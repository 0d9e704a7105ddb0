"""Other libraries' own test suites with ours swapped in: how they are counted, and one of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.swapped.measure import SUITES, Suite, compare, sdist_of
from tests.required import require

TESTS = """
import os
def test_passes(): pass
def test_is_refused(): assert not SWAPPED, "cannot be exact"
def test_is_wrong(): assert not SWAPPED
def test_is_wrong_without_us_too(): assert False
SWAPPED = os.environ["CHECKFREQ_SWAPPED"] == "1"
"""


def test_what_fails_is_by_design_or_ours_or_fails_without_us_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_theirs.py").write_text(TESTS)
    by_design = {"cannot be exact": "refused"}
    suite = Suite("torch", "tests", ["test_theirs.py"], by_design=by_design)
    monkeypatch.setitem(SUITES, "accelerate", suite)
    assert compare("accelerate", tmp_path) == {
        "passed": 1,
        "skipped": 0,
        "by_design": {"refused": 1},
        "fails_without_us": 1,
        "failed": ["test_theirs::test_is_wrong"],
    }


def test_accelerates_own_tests_of_checkpoints_pass_with_ours() -> None:
    try:
        checkout = sdist_of("accelerate")
    except subprocess.CalledProcessError:
        require("sdist", "the sdist of accelerate cannot be downloaded")
    found = compare("accelerate", checkout)
    assert found["failed"] == []
    assert found["passed"] == 16
