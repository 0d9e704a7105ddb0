"""Every file of tests that need a GPU can be run by itself, and is part of the GPU proof."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.runner import ROOT
from tests.gpu.stages.tests import PATHS

MARKED = re.compile(r"^(?:@|pytestmark = .*)pytest\.mark\.gpu\b", re.MULTILINE)
ALL = sorted((ROOT / "tests").rglob("test_*.py"))
FILES = [path for path in ALL if MARKED.search(path.read_text())]
#: PyTorch warns once per process that this is a prototype: only the first test would fail.
WARNS = re.compile(r"set_sync_debug_mode|host_must_not_wait")


@pytest.mark.more
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_can_be_run_by_itself(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    assert "::" in ended.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_that_turn_debug_modes_on_expect_their_warnings(path: Path) -> None:
    text = path.read_text()
    assert "ignore::UserWarning" in text or not WARNS.search(text)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_part_of_the_proof(path: Path) -> None:
    assert any(path.is_relative_to(ROOT / part) for part in PATHS)
