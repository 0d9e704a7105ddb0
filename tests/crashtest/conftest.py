"""Crash tests of the planted scripts, started from a process that has imported torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq.crashtest.trial import PLACEHOLDER, Settings
from checkfreq.crashtest.verdict import Verdict
from checkfreq.crashtest.work import tested

HERE = Path(__file__).parent
FORKED = HERE / "forked.py"

CrashTest = Callable[..., Verdict]


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The beginning of a command that runs a script as a fork."""
    path = str(tmp_path_factory.mktemp("forks") / "socket")
    with subprocess.Popen(
        [sys.executable, str(FORKED), "serve", path],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield [sys.executable, "-S", "-I", str(FORKED), "run", path]
        server.kill()


@pytest.fixture
def crashtest(forks: list[str], tmp_path: Path) -> CrashTest:
    """Tests a script of ``scripts/`` with a planted fault, or none."""

    def test(script: str, fault: str = "", *, kills: int = 2, seed: int = 0) -> Verdict:
        is_plain = script == "plain"
        arguments = [PLACEHOLDER] * is_plain + [fault] * bool(fault)
        settings = Settings(
            command=[*forks, str(HERE / "scripts" / f"{script}.py"), *arguments],
            kills=kills,
            seed=seed,
            pattern="*.pt" if is_plain else "",
            timeout_s=200.0,
            jobs=2,
        )
        verdict = tested(settings, keep=str(tmp_path / "kept"), say=print)
        print("\n".join(verdict.lines()))
        return verdict

    return test
