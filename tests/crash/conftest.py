"""Fault scripts for tests whose trainer is the test process itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from checkfreq import faults


@pytest.fixture
def fault_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Install a script: at once in this process, and in each worker started from now on."""

    def install(script: str) -> None:
        monkeypatch.setenv("CHECKFREQ_FAULT", script)
        faults.reload()

    yield install
    monkeypatch.delenv("CHECKFREQ_FAULT", raising=False)
    faults.reload()
