"""Every snippet of the documentation runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIMIT_S = 600.0


def run_page(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a page in a process and a folder of its own."""
    bin_folder = Path(sys.executable).parent
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path}
    command = [sys.executable, "-u", "-m", "tests.docs.page", str(page)]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # commands of the page too: they hold the pipe
            raise
    return subprocess.CompletedProcess(command, process.returncode, said)


@pytest.mark.more
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_snippet_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    ran = run_page(page, tmp_path)
    assert ran.returncode == 0, ran.stdout


def test_snippets_of_a_page_share_a_namespace_and_a_folder_with_the_files_that_are_named(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- setup\nname = 'made'\n-->\n```python\nopen(name, 'w').close()\n```\n"
        "```console\n$ test -e made && \\\n    mv made moved\n$ false  # exits 1\n"
        "$ echo 'A   2 s'; echo B=31\nA 1.5 s\nB=1\n```\n"
        "```python\nassert __import__('os').path.exists('moved')\n```\n"
        "```python\n# train.py\nraise SystemExit(3)\n```\n"
        "```console\n$ python train.py  # exits 3\n```\n"
    )
    ran = run_page(page, tmp_path)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize(
    ("snippet", "line"),
    [
        ("```python\nassert 1 == 2\n```\n", 4),
        ("```console\n$ true\n$ false\n```\n", 5),
        ("```console\n$ true\n$ echo durable step None\ndurable step 2\n```\n", 5),
    ],
)
def test_a_snippet_that_fails_is_named_by_its_line(snippet: str, line: int, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{snippet}")
    ran = run_page(page, tmp_path)
    assert ran.returncode != 0
    assert f'page.md", line {line}' in ran.stdout or f"page.md:{line}:" in ran.stdout
