"""Directories, and a hand on the two processes through their fault scripts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SetFault = Callable[[str], None]
Hold = Callable[[str], "Gate"]


@pytest.fixture
def chk_dir(tmp_path: Path) -> Path:
    return tmp_path / "chk"


@pytest.fixture
def worker_fault(monkeypatch: pytest.MonkeyPatch) -> SetFault:
    """Gives workers started from now on a fault script; this process keeps its own."""
    return lambda script: monkeypatch.setenv("CHECKFREQ_FAULT", script)


@pytest.fixture
def trainer_fault(fault_script: SetFault) -> SetFault:
    """Gives this process a fault script."""
    return fault_script


class Gate:
    """Where a process waits, from the time it gets there until ``open``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def script(self, point: str) -> str:
        return f"{point}:pause-{self._path}:*"

    def wait_reached(self) -> None:
        """Return once somebody waits there."""
        deadline_s = time.monotonic() + 120.0
        while not Path(f"{self._path}.reached").exists():
            assert time.monotonic() < deadline_s, f"nobody came to {self._path}"
            threading.Event().wait(0.001)

    def open(self) -> None:
        self._path.touch()


@pytest.fixture
def hold_worker(tmp_path: Path, worker_fault: SetFault) -> Iterator[Hold]:
    """Has workers started from now on wait at a point."""
    gate = Gate(tmp_path / "worker-gate")

    def hold(point: str) -> Gate:
        worker_fault(gate.script(point))
        return gate

    yield hold
    gate.open()


@pytest.fixture
def hold_trainer(tmp_path: Path, trainer_fault: SetFault) -> Iterator[Hold]:
    """Has this process's copy thread wait at a point."""
    gate = Gate(tmp_path / "trainer-gate")

    def hold(point: str) -> Gate:
        trainer_fault(gate.script(point))
        return gate

    yield hold
    gate.open()
