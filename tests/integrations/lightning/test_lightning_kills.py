"""A Lightning run that was killed ends with the same bits as one that was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.more, pytest.mark.crash]

ROOT = Path(__file__).resolve().parents[3]

CASES = {
    "automatic": "accumulation, validation inside the epoch, plateau, ModelCheckpoint, a patience",
    "manual": "manual optimization, two optimizers, loader workers, ModelCheckpoint by steps",
    "averaged": "a loss scale, averaged weights, an epoch cut short, early stopping",
    "stream": "an iterable dataset without a length, up to max_steps",
    "ranks": "two ranks under DDP",
}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the killer says of all cases; one process, since Lightning takes seconds to import."""
    folder = tmp_path_factory.mktemp("kills")
    places = [word for case in CASES for word in (case, str(folder / case))]
    with (folder / "output").open("w+") as file:
        subprocess.run(
            [sys.executable, "-m", "tests.integrations.lightning.killing", "1", *places],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=800,
            check=True,
        )
        file.seek(0)
        return file.read()


@pytest.mark.parametrize("case", CASES)
def test_after_eight_kills_a_run_has_the_bits_of_one_without(case: str, output: str) -> None:
    assert f"{case}: passed" in output, output[-20000:]
