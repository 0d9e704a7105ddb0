"""Every deliberate break of the order of snapshots is noticed by some test."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
import torch

from tests.mutations.breaks import BREAKS, GROUPS
from tests.mutations.trial import ROOT, broken, in_turns


def test_what_a_break_replaces_is_there_once_and_the_result_is_python() -> None:
    for one in BREAKS:
        text = (ROOT / one.file).read_text()
        changed = broken(text, one.edits)
        assert changed != text, one.name
        ast.parse(changed)


def test_a_break_whose_text_is_gone_or_found_twice_is_an_error() -> None:
    for text in ("", "wait wait"):
        with pytest.raises(ValueError, match="expected once"):
            broken(text, [("wait", "pass")])


def test_each_break_has_a_name_and_says_why_where_it_cannot_be_seen() -> None:
    known = gpu_tests()
    assert len({one.name for one in BREAKS}) == len(BREAKS)
    for one in BREAKS:
        assert one.gpu in known or (one.gpu is None and one.why), one.name
        assert one.fake or one.file == "checkfreq/snapshot/cuda.py", one.name


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("group", [n for n, some in GROUPS.items() if any(o.fake for o in some)])
def test_each_break_fails_a_test(group: str) -> None:
    assert tried("--group", group, "--trials", "broken") == 0


@pytest.mark.more
@pytest.mark.slow
def test_without_a_break_all_tests_that_notice_one_pass() -> None:
    assert tried("--trials", "whole") == 0


@pytest.mark.more
def test_a_break_that_no_test_notices_is_told() -> None:
    """What the GPU tests would notice passes here, where they are skipped."""
    is_noticed = torch.cuda.is_available()
    assert tried("--gpu", "--only", "a wait is not queued") == (0 if is_noticed else 1)


def tried(*options: str) -> int:
    command = [sys.executable, "-m", "tests.mutations", *options]
    return subprocess.run(command, cwd=ROOT).returncode


def test_cases_of_one_test_take_turns_with_those_of_others() -> None:
    assert in_turns(["a", "a", "a", "a", "b", "b", "b", "c"]) == [0, 1, 4, 5, 7, 2, 3, 6]


def gpu_tests() -> set[str]:
    """The names of all test functions in tests/gpu."""
    return {
        node.name
        for path in (ROOT / "tests" / "gpu").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
