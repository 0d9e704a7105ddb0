"""The GPU proof keeps what it found, whatever happens to a stage or to the run, and says what."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.__main__ import LIMITS_S, PARTS
from tests.gpu.page import page, read
from tests.gpu.runner import ROOT, Lines, Stage, run_all

LONG_S = 300.0
SAYS = 'print(\'{"what": "one", "ok": true}\', flush=True)'
FOREVER = "\nimport time\nwhile True: time.sleep(1)"
ALL = [(part, name) for part, names in PARTS.items() for name in names]
#: A file of tests of which one passes, one fails, one is skipped, two kill their process in their
#: ways, and one comes after them.
ENDINGS = """
import os, time, pytest
def test_a_passes(): pass
def test_b_fails(): assert 1 == 2
def test_c_skips(): pytest.skip("no such part")
def test_d_crashes(): os._exit(9)
def test_e_hangs(): time.sleep(3600)
def test_f_passes(): pass
"""


def stage(name: str, code: str, limit_s: float = LONG_S) -> Stage:
    return Stage(name, ("-c", code), limit_s)


def ran(path: Path, *stages: Stage, limit_s: float = LONG_S) -> tuple[bool, list[dict[str, Any]]]:
    """Whether all was good, and the lines without their times."""
    lines = Lines(path)
    is_good = run_all(stages, lines, limit_s=limit_s)
    lines.close()
    return is_good, [{**line} for line in read([path])]


def ends(lines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {line["stage"]: line for line in lines if line.get("event") in ("ends", "skipped")}


def test_lines_are_kept_as_they_come_with_their_stage_and_time(tmp_path: Path) -> None:
    says = 'print(\'{"stage": "other", "at_s": -1, "n": 1}\')'
    is_good, lines = ran(tmp_path / "new" / "lines", stage("a", says), stage("b", says))
    assert is_good
    found = [line for line in lines if "n" in line]
    assert [line["stage"] for line in found] == ["a", "b"]
    assert 0 <= found[0]["at_s"] <= found[1]["at_s"]
    assert all(line["ok"] and line["seconds"] >= 0 for line in ends(lines).values())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_lines_before_a_kill_of_the_run_are_there(tmp_path: Path, number: int) -> None:
    path = tmp_path / "lines"
    tells = f"import os; print('{{\"pid\": %d}}' % os.getpid(), flush=True){FOREVER}"
    code = f"""
import signal, sys
from pathlib import Path
from tests.gpu.__main__ import _exit
from tests.gpu.runner import Lines, Stage, run_all
signal.signal(signal.SIGTERM, _exit)
stages = [Stage("a", ("-c", {SAYS!r}), 99.0), Stage("b", ("-c", {tells!r}), 99.0)]
run_all(stages, Lines(Path({str(path)!r})), limit_s=99.0)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = next(found["pid"] for line in process.stdout if "pid" in (found := json.loads(line)))
    process.send_signal(number)
    process.stdout.close()
    assert process.wait(LONG_S) != 0
    if number == signal.SIGKILL:
        os.killpg(pid, signal.SIGKILL)  # nobody else ends it then
    else:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)
    lines = read([path])
    assert [line["stage"] for line in lines if "event" not in line] == ["a", "b"]
    assert list(ends(lines)) == ["a"]


def test_a_stage_that_hangs_is_ended_and_one_without_time_skipped_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    deaf = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {SAYS}{FOREVER}"
    stages = stage("hangs", deaf, 2.0), stage("long", SAYS), stage("short", SAYS, 4.0)
    is_good, lines = ran(tmp_path / "lines", *stages, limit_s=20.0)
    assert not is_good
    assert ends(lines)["hangs"]["problem"] == "it did not end within 2 s"
    assert "it may take 300 s, and " in ends(lines)["long"]["why"]
    assert ends(lines)["short"]["ok"]


FAILING = {
    "status": (
        "[print(n) for n in range(99)]; raise SystemExit('no such card')",
        "it ended with status 1",
    ),
    "claim": (
        "[print(n) for n in range(99)]; print('{\"ok\": false}\\nno such card')",
        "1 of its lines are not as they should be",
    ),
}


@pytest.mark.parametrize(("code", "problem"), FAILING.values(), ids=FAILING.keys())
def test_a_stage_that_fails_is_named_with_its_last_output(
    tmp_path: Path, code: str, problem: str
) -> None:
    is_good, lines = ran(tmp_path / "lines", stage("fails", code))
    assert not is_good
    assert ends(lines)["fails"]["problem"] == problem
    output = ends(lines)["fails"]["output"]
    assert {"98", "no such card"} <= {*output}
    assert "0" not in output


@pytest.mark.parametrize("part", PARTS)
def test_the_stages_of_a_part_are_expected_to_fit_its_time(part: int) -> None:
    assert sum(expected_s for expected_s, _ in PARTS[part].values()) <= LIMITS_S[part]
    assert all(expected_s <= at_most_s for expected_s, at_most_s in PARTS[part].values())


@pytest.mark.more
@pytest.mark.slow
def test_all_tests_are_run_although_some_end_their_process(tmp_path: Path) -> None:
    file = tmp_path / "test_endings.py"
    file.write_text(ENDINGS)
    code = f"from tests.gpu.stages.tests import main; main([{str(file)!r}], mark='', limit_s=10)"
    _, lines = ran(tmp_path / "lines", stage("tests", code))
    outcomes = {
        line["test"].rpartition("::")[2]: (line["outcome"], line.get("why"))
        for line in lines
        if "test" in line
    }
    hung = "it was killed: it did not end within 10 s, or took too much memory"
    assert outcomes == {
        "test_a_passes": ("passed", ""),
        "test_b_fails": ("failed", "assert 1 == 2"),
        "test_c_skips": ("skipped", "no such part"),
        "test_d_crashes": ("failed", "its process ended with status 9"),
        "test_e_hangs": ("failed", hung),
        "test_f_passes": ("passed", ""),
    }
    (all_tests,) = [line for line in lines if line.get("what") == "all tests"]
    counts = {name: all_tests[name] for name in ("collected", "passed", "failed", "skipped")}
    assert counts == {"collected": 6, "passed": 2, "failed": 3, "skipped": 1}
    assert all_tests["not_reached"] == 0


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize(("part", "name"), ALL, ids=[name for _, name in ALL])
def test_each_stage_starts_and_ends_without_a_device(tmp_path: Path, part: int, name: str) -> None:
    out = tmp_path / "lines"
    command = [sys.executable, "-m", "tests.gpu", "--dry", "--out", str(out)]
    command += ["--part", str(part), "--only", name]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = read([out])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ends(lines)[name]["ok"]
    # A claim that does not hold fails its stage; on a busy machine gpt2 may have none to make.
    assert [line for line in lines if "event" not in line]
    assert page(lines).startswith(f"# checkfreq on a GPU, part {part}: PASSED, a dry run")
