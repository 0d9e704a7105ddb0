"""The page of a GPU run: on any machine, whatever fails, and complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.__main__ import MEASUREMENTS, TESTS, Task, run, run_all
from tests.gpu.page import (
    NO_DEVICE,
    ROOT,
    Results,
    Step,
    about_this_machine,
    is_good,
    page,
)

LONG_S = 300.0
ABOUT = {"commit": "abc", "device": "1 x a GPU", "kernel": "6.1"}
SNAPSHOTS = {
    **{"benchmark": "device", "what": "snapshots", "gib": 1.0, "place": "device", "saves": 5},
    **{"exact": 5, "stall_ms": 0.4, "waited_ms": 1.0, "copy_s": 0.1, "overlap": 0.99},
    "slots_s": 1.5,
}
PINNING = {"benchmark": "device", "what": "pinning", "gib": 1.0, "pin_s": 0.11, "unpin_s": 0.05}
TARGET = {
    **{"benchmark": "compare", "target": "held", "among": "all", "best": "peer", "ratio": 0.05},
    **{"allowed": 0.1, "met": True},
}
#: A file of tests of which one passes, one fails and one is skipped, then the process dies.
ENDINGS = """
import os, pytest
def test_passes(): pass
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("no such part")
def test_kills(): os._exit(9)
"""


def test_the_page_says_where_what_was_run_and_what_was_measured() -> None:
    tests = Results(passed=["a", "b"], skipped={"c": "needs two CUDA devices"})
    text = page(
        ABOUT, tests, [Step("device", lines=[SNAPSHOTS, PINNING]), Step("x", lines=[TARGET])]
    )
    assert text.startswith("checkfreq on a GPU: PASSED\n")
    for part in (
        "1 x a GPU",
        "2 passed, 0 failed, 1 skipped",
        "1: needs two CUDA devices",
        "stall 0.4 ms, overlap 99.0 %",
        "exact: 5 of 5",
        "pinning 1 GiB: 0.11 s",
        "held, against all (peer): 0.05 (target 0.1: met)",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("tests", "steps", "device"),
    [
        (Results(passed=["a"], failed={"b": "why"}), [], True),
        (Results(passed=["a"]), [Step("compare", "it ended with status 1")], True),
        (Results(passed=["a"]), [], False),
        (Results(skipped={"a": "why"}), [], True),
    ],
)
def test_anything_that_was_not_run_or_not_passed_is_no_success(
    tests: Results, steps: list[Step], device: bool
) -> None:
    assert not is_good(tests, steps, device=device)
    about = ABOUT if device else {**ABOUT, "device": NO_DEVICE}
    verdict = "FAILED" if device else f"NOT TESTED: {NO_DEVICE}"
    assert page(about, tests, steps).startswith(f"checkfreq on a GPU: {verdict}\n")


def test_measurements_are_run_even_if_tests_fail_or_crash(tmp_path: Path) -> None:
    file = tmp_path / "test_endings.py"
    file.write_text(ENDINGS)
    command = ("-m", "pytest", "-p", "tests.gpu.outcomes", "-p", "no:cacheprovider", str(file))
    measurement = Task("measurement", ("-c", "print('{\"what\": 1}'); print('shown')"), LONG_S)
    tests, steps = run_all([Task("tests", command, LONG_S)], [measurement])
    named = {name.rpartition("::")[2]: why for name, why in tests.failed.items()}
    assert [name.rpartition("::")[2] for name in tests.passed] == ["test_passes"]
    assert named == {"test_fails": "assert 1 == 2", "test_kills": "it did not end"}
    assert list(tests.skipped.values()) == ["no such part"]
    assert [step.problem for step in steps] == ["it ended with status 9", ""]
    assert list(steps[1].lines) == [{"what": 1}]
    assert list(steps[1].last_output) == ["shown"]
    text = page(ABOUT, tests, steps)
    assert "failed   " in text
    assert "assert 1 == 2" in text


@pytest.mark.more
def test_a_task_that_is_late_is_ended_and_named() -> None:
    step = run(Task("late", ("-c", "import time; time.sleep(3600)"), 0.5))
    assert step.problem == "it did not end within 0 s"


def test_the_whole_run_is_meant_to_fit_nine_minutes() -> None:
    assert TESTS.limit_s + sum(task.limit_s for task in MEASUREMENTS) <= 9 * 60


def test_the_machine_is_described_without_its_name() -> None:
    import platform

    about = about_this_machine()
    assert all(about.values())
    assert platform.node() not in about.values()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.more
def test_without_a_device_the_page_says_so_and_nothing_counts_as_tested(tmp_path: Path) -> None:
    out = tmp_path / "folder" / "page.txt"
    command = [sys.executable, "-m", "tests.gpu", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert out.read_text().startswith(f"checkfreq on a GPU: NOT TESTED: {NO_DEVICE}\n")
    assert out.read_text() in ended.stdout
    assert f"tests: 0 passed, 0 failed, {num_skipped(out.read_text())} skipped" in out.read_text()


def num_skipped(text: str) -> int:
    """The sum of the lines that give reasons."""
    lines = [line.split() for line in text.splitlines() if line.startswith("  skipped")]
    return sum(int(words[1].rstrip(":")) for words in lines)
