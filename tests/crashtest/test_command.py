"""``checkfreq crashtest`` as one types it: other signals, lost machines, ranks, scripts of others.

The scripts are processes of their own, which import torch: the planted faults are found one by one,
and faster, in ``test_planted_faults.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = [pytest.mark.more, pytest.mark.crash, pytest.mark.slow]


@dataclass(frozen=True)
class Said:
    """What the command ended with, and its JSON."""

    status: int
    verdict: dict[str, Any]
    progress: str

    @property
    def kills(self) -> list[str]:
        return [kill["how"] for kill in self.verdict["kills"]]


def crashtest(folder: Path, *options: str, script: str = "train", arguments: str = "") -> Said:
    command = [sys.executable, "-m", "checkfreq.cli", "crashtest", "--json", "--kills", "2"]
    train = [sys.executable, str(SCRIPTS / f"{script}.py"), *arguments.split()]
    done = subprocess.run(
        [*command, *options, "--", *train],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=folder,
    )
    print(done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return Said(done.returncode, json.loads(done.stdout), done.stderr)


@pytest.mark.parametrize("options", ["--signal TERM", "--group"])
def test_a_script_that_is_told_to_stop_or_loses_its_machine_resumes_exactly(
    options: str, tmp_path: Path
) -> None:
    (tmp_path / "chk").mkdir()
    (tmp_path / "chk" / "mine").write_text("mine")
    said = crashtest(tmp_path, *options.split())
    assert [path.name for path in (tmp_path / "chk").iterdir()] == ["mine"]  # left alone
    assert (said.status, said.verdict["outcome"]) == (0, "exact")
    name = "SIGTERM" if "TERM" in options else "SIGKILL"
    whom = "every process" if "--group" in options else "the script"
    assert said.kills[0] == f"{name} to {whom}"
    if name == "SIGTERM":  # it goes on to the next boundary, and what it has there is saved
        assert all(kill["restored_step"] == kill["step"] for kill in said.verdict["kills"])


def test_a_script_that_saves_by_itself_into_its_own_folder_passes(tmp_path: Path) -> None:
    options = ("--dir", "own", "--glob", "latest.*")
    said = crashtest(tmp_path, *options, script="plain", arguments="own")
    assert (said.status, said.verdict["outcome"]) == (0, "exact")
    assert said.kills[0] == "in the middle of a save"
    assert (tmp_path / "own" / "latest.pt").exists()


def test_a_script_that_depends_on_the_order_of_a_set_is_not_deterministic(tmp_path: Path) -> None:
    said = crashtest(tmp_path, "--jobs", "2", script="loop", arguments="set-order")
    assert (said.status, said.verdict["outcome"]) == (1, "not_deterministic")
    assert [cause["name"] for cause in said.verdict["causes"]] == ["hash-seed"]


@pytest.mark.dist
def test_two_ranks_resume_exactly(tmp_path: Path) -> None:
    said = crashtest(tmp_path, "--ranks", "2")
    assert (said.status, said.verdict["outcome"], said.verdict["ranks"]) == (0, "exact", 2)
    assert len(said.kills) == 3
    assert said.kills[0] in ("SIGKILL to rank 0", "SIGKILL to rank 1")
    assert all(kill["restored_step"] for kill in said.verdict["kills"][:2])
    assert said.kills[2] == "after its last checkpoint"
