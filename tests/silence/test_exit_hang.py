"""A loader with workers is left open when its process ends: the process ends at once all the same.

Batches of ``LARGE`` samples do not fit a pipe, so workers that hand them over wait for a reader.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from iterators import CFIterator
from tests.silence.training import start

ROOT = Path(__file__).resolve().parents[2]

LARGE = 50_000
LEFT_OPEN: list[Any] = []


class Arrays(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        return np.zeros(self.size)


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        return (np.zeros(self.size) for _ in range(400))


def leave_open(dataset: Any, **settings: Any) -> None:
    """Take a batch, and keep the rest of the epoch for the exit to find."""
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", **settings}
    loader = DataLoader(dataset, 4, collate_fn=list, **workers)
    batches = iter(CFIterator(loader))
    next(batches)
    LEFT_OPEN.append(batches)


def persistent(_: str, __: int) -> None:
    leave_open(Arrays(LARGE), persistent_workers=True)


def streamed(_: str, __: int) -> None:
    leave_open(Stream(LARGE))


@pytest.mark.parametrize("program", [persistent, streamed])
def test_a_process_that_leaves_a_loader_open_ends_without_an_error(
    program: Any, tmp_path: Path
) -> None:
    assert start(program, tmp_path).exit_code == 0


def test_a_script_that_ends_by_an_exception_says_nothing_else() -> None:
    code = "from tests.silence.test_exit_hang import *; leave_open(Arrays(LARGE)); 1 / 0"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "worker" not in done.stderr
