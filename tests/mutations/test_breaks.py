"""Every deliberate break of the order of snapshots is noticed by some test."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.mutations.breaks import BREAKS, GROUPS
from tests.mutations.edits import Break
from tests.mutations.trial import ROOT, broken, in_turns

ALL = pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.name)
ON_HOST = [name for name, group in GROUPS.items() if any(one.fake for one in group)]


@ALL
def test_what_a_break_replaces_is_there_once_and_the_result_is_python(one: Break) -> None:
    text = (ROOT / one.file).read_text()
    changed = broken(text, one.edits)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))


def test_a_break_whose_text_is_gone_or_found_twice_is_an_error() -> None:
    for text in ("", "wait wait"):
        with pytest.raises(ValueError, match="expected once"):
            broken(text, [("wait", "pass")])


@ALL
def test_a_break_that_cannot_be_seen_somewhere_says_why(one: Break) -> None:
    assert one.gpu in gpu_tests() or (one.gpu is None and one.why)
    assert one.fake or one.why


def test_no_two_breaks_have_the_same_name() -> None:
    assert len({one.name for one in BREAKS}) == len(BREAKS)


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("group", ON_HOST)
def test_each_break_fails_a_test(group: str) -> None:
    run_trials("--group", group, "--trials", "broken")


@pytest.mark.more
@pytest.mark.slow
def test_without_a_break_all_tests_that_notice_one_pass() -> None:
    run_trials("--trials", "whole")


def test_cases_of_one_test_take_turns_with_those_of_others() -> None:
    assert in_turns(["a", "a", "a", "a", "b", "b", "b", "c"]) == [0, 1, 4, 5, 7, 2, 3, 6]


def run_trials(*options: str) -> None:
    command = [sys.executable, "-m", "tests.mutations", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.more
def test_a_break_that_no_test_notices_is_told() -> None:
    """What the GPU tests would notice passes here, where they are skipped."""
    command = [sys.executable, "-m", "tests.mutations", "--gpu", "--only", "a wait is not queued"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == (1 if not has_device() else 0)


def has_device() -> bool:
    import torch

    return torch.cuda.is_available()


def gpu_tests() -> set[str]:
    """The names of all test functions in tests/gpu."""
    return {
        node.name
        for path in (ROOT / "tests" / "gpu").glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
