"""``checkfreq crashtest``: wrong usage, and scripts that cannot be tested."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checkfreq.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "expected a command after --"),
        (["--signal", "NO", "--", "true"], "expected a signal such as KILL"),
        (["--kills", "0", "--", "true"], "0 is not in the range"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_was_expected(
    argv: list[str], said: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["crashtest", *argv])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_script_that_fails_by_itself_ends_with_2_and_its_last_lines(capsys: Capture) -> None:
    script = "print('loading'); raise SystemExit('no data here')"
    assert main(["crashtest", "--", sys.executable, "-S", "-c", script]) == 2
    said = capsys.readouterr().err
    assert "failed without a kill" in said
    assert "no data here" in said


def test_a_script_that_trains_nothing_ends_with_2(capsys: Capture) -> None:
    assert main(["crashtest", "--", sys.executable, "-S", "-c", "pass"]) == 2
    assert "the script made no CFManager" in capsys.readouterr().err


def test_a_command_that_is_not_there_ends_with_2(capsys: Capture) -> None:
    assert main(["crashtest", "--", "no-such-command-anywhere"]) == 2
    assert "cannot run 'no-such-command-anywhere'" in capsys.readouterr().err


def test_a_folder_that_holds_files_is_refused_and_left_alone(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "mine.pt").write_bytes(b"mine")
    argv = ["crashtest", "--dir", str(tmp_path), "--glob", "*.pt", "--", "true"]
    assert main(argv) == 2
    assert "expected an empty folder, or none" in capsys.readouterr().err
    assert (tmp_path / "mine.pt").read_bytes() == b"mine"


def test_a_folder_without_a_pattern_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert main(["crashtest", "--dir", str(tmp_path), "--", "true"]) == 2
    assert "expected --glob PATTERN too" in capsys.readouterr().err
