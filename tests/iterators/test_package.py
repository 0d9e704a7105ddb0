"""What importing the package costs, and that a killed process resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import iterators

PACKAGE = Path(iterators.__file__).parent


def test_every_public_name_is_there() -> None:
    assert {name for name in dir(iterators) if getattr(iterators, name)} == set(iterators.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        iterators.Missing  # noqa: B018


def test_the_package_and_its_iterator_import_without_torch() -> None:
    use = "iterators.CFIterator([1], exact=False)"
    code = f"import sys, iterators; {use}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent, timeout=240)


BESIDE = """
import multiprocessing, sys
from checkfreq import CFIterator, isolated_rng
from torch.utils.data import DataLoader
if __name__ == "__main__":
    loader = CFIterator(DataLoader(range(8), 4, num_workers=1, multiprocessing_context="spawn"))
    assert len([*loader]) == 2
    with isolated_rng():
        import iterators
        assert iterators.CFIterator is CFIterator
"""


@pytest.mark.more
def test_checkfreq_hands_on_the_iterator_beside_a_file_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "iterators.py").write_text("raise RuntimeError('the file was imported')")
    script = tmp_path / "train.py"
    script.write_text(BESIDE)
    paths = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, script], check=True, env=paths, cwd=tmp_path, timeout=240)


def test_a_file_that_was_imported_under_the_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "iterators.py").write_text("")
    code = "import iterators; from checkfreq import CFIterator"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGE.parent}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert f"{tmp_path}/iterators.py was imported as 'iterators'" in done.stderr
    assert "rename that file" in done.stderr
