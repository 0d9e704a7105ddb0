"""Directories, and a hand on the two processes through their fault scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq import faults

SetFault = Callable[[str], None]
Hold = Callable[[str], Callable[[], None]]


@pytest.fixture
def chk_dir(tmp_path: Path) -> Path:
    return tmp_path / "chk"


@pytest.fixture
def worker_fault(monkeypatch: pytest.MonkeyPatch) -> SetFault:
    """Gives workers started from now on a fault script; this process keeps its own."""
    return lambda script: monkeypatch.setenv("CHECKFREQ_FAULT", script)


@pytest.fixture
def trainer_fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetFault]:
    """Gives this process a fault script."""

    def install(script: str) -> None:
        monkeypatch.setenv("CHECKFREQ_FAULT", script)
        faults.reload()

    yield install
    monkeypatch.delenv("CHECKFREQ_FAULT", raising=False)
    faults.reload()


@pytest.fixture
def hold_worker(tmp_path: Path, worker_fault: SetFault) -> Iterator[Hold]:
    """Has workers started from now on wait at a point; returns what lets them go on."""
    gate = tmp_path / "worker-may-go-on"

    def hold(point: str) -> Callable[[], None]:
        worker_fault(f"{point}:pause-{gate}:*")
        return gate.touch

    yield hold
    gate.touch()


@pytest.fixture
def hold_trainer(tmp_path: Path, trainer_fault: SetFault) -> Iterator[Hold]:
    """Has this process's copy thread wait at a point; returns what lets it go on."""
    gate = tmp_path / "trainer-may-go-on"

    def hold(point: str) -> Callable[[], None]:
        trainer_fault(f"{point}:pause-{gate}:*")
        return gate.touch

    yield hold
    gate.touch()
