"""Builds the packages that users install, once, from a copy of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.required import require

ROOT = Path(__file__).resolve().parents[2]
#: Made by ``make packaging`` from requirements.txt beside this file.
TOOLS = Path(os.environ.get("CHECKFREQ_PACKAGING", ROOT / ".venv-packaging")) / "bin" / "python"
_LIMIT_S = 600.0


@dataclass(frozen=True)
class Packages:
    """The files that were built."""

    wheel: Path
    sdist: Path


def run(
    command: Sequence[str | Path], *, cwd: Path, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment without our source tree; what it said is in the failure."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
    )
    assert not check or done.returncode == 0, done.stdout
    return done


def build(folder: Path) -> Packages:
    """The sdist, and the wheel that is built from it."""
    if not TOOLS.exists():
        require("packaging", f"no build and twine: {TOOLS} is not there (make packaging)")
    source, out = folder / "source", folder / "dist"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    for name in ("checkfreq", "iterators"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    run([TOOLS, "-m", "build", "--no-isolation", "--outdir", out, source], cwd=folder)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Packages(wheel, sdist)


def installed(packages: Packages, folder: Path, *, beside: Sequence[str] | None = None) -> Path:
    """The ``bin`` of an environment with the wheel, in which our own tree is not found.

    ``beside``: of the packages of this environment, only these; by default all of them.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run([*pip, "--no-deps", "--no-index", packages.wheel], cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    here = Path(sysconfig.get_path("purelib"))
    if beside is None:
        (site / "beside.pth").write_text(f"{here}\n")
    for name in beside or ():
        (site / name).symlink_to(here / name)
    return python.parent
