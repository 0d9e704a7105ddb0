"""The worker imports the trainer's packages, and nothing from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import checkfreq

ROOT = Path(checkfreq.__file__).parents[1]

#: Starts what would be the worker, which finds that it was given no descriptors.
START = """
import subprocess, sys
from checkfreq.persist.launch import worker_command, worker_environment
done = subprocess.run(
    worker_command(()), env=worker_environment(), capture_output=True, text=True, timeout=300
)
print(done.stderr)
"""


def plant(folder: Path) -> Path:
    """Modules that print when they are imported."""
    folder.mkdir()
    for name in ("xxhash", "json", "socket", "queue", "checkfreq", "platform"):
        (folder / f"{name}.py").write_text(
            f"open({str(folder / 'ran')!r}, 'a').write(__name__)\nraise ImportError(__name__)\n"
        )
    return folder


def run(command: list[str], cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_in_the_current_directory_is_imported(tmp_path: Path) -> None:
    planted = plant(tmp_path / "planted")
    script = tmp_path / "train.py"
    script.write_text(START)
    text = run([sys.executable, str(script)], planted, PYTHONPATH=str(ROOT))
    assert "not enough values to unpack" in text
    assert not (planted / "ran").exists()


def test_no_other_module_is_imported_from_the_trainers_path(tmp_path: Path) -> None:
    planted = plant(tmp_path / "planted")
    late = f"import sys\nimport checkfreq.persist.launch\nsys.path.insert(0, {str(planted)!r})"
    text = run([sys.executable, "-c", late + START], tmp_path, PYTHONPATH=str(ROOT))
    assert "not enough values to unpack" in text
    assert not (planted / "ran").exists()


def test_the_worker_imports_from_an_archive_if_the_trainer_does(tmp_path: Path) -> None:
    archive = tmp_path / "packages.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted((ROOT / "checkfreq").rglob("*.py")):
            file.write(path, path.relative_to(ROOT))
    text = run([sys.executable, "-c", START], tmp_path, PYTHONPATH=str(archive))
    assert "not enough values to unpack" in text
    assert "packages.zip/checkfreq/persist/worker.py" in text
