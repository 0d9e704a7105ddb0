"""``checkfreq crashtest``: scripts that cannot be tested, and folders that hold files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checkfreq.cli import main

Capture = pytest.CaptureFixture[str]


def test_a_script_that_fails_by_itself_ends_with_2_and_its_last_lines(capsys: Capture) -> None:
    script = "print('loading'); raise SystemExit('no data here')"
    assert main(["crashtest", "--", sys.executable, "-S", "-c", script]) == 2
    said = capsys.readouterr().err
    assert "failed without a kill" in said
    assert "no data here" in said


def test_a_folder_that_holds_files_is_refused_and_left_alone(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "mine.pt").write_bytes(b"mine")
    argv = ["crashtest", "--dir", str(tmp_path), "--glob", "*.pt", "--", "true"]
    assert main(argv) == 2
    assert "expected an empty folder, or none" in capsys.readouterr().err
    assert (tmp_path / "mine.pt").read_bytes() == b"mine"
