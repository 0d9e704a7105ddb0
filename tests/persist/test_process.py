"""A worker's process: a child, and one that an earlier trainer started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from checkfreq.persist.process import AdoptedWorker, ChildWorker, WorkerProcess, how_it_ended

DEADLINE_S = 120.0


@pytest.fixture(params=["child", "adopted"])
def process(request: pytest.FixtureRequest) -> Iterator[WorkerProcess]:
    """A process that waits for the end of its input."""
    popen = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"],
        stdin=subprocess.PIPE,
        text=True,
    )
    worker: WorkerProcess = ChildWorker(popen)
    if request.param == "adopted":
        worker = AdoptedWorker(popen.pid, os.pidfd_open(popen.pid))
    yield worker
    popen.kill()
    popen.communicate(timeout=DEADLINE_S)
    worker.close()


def test_a_running_process_has_no_exit_code(process: WorkerProcess) -> None:
    assert process.is_alive()
    assert not process.wait(0.0)
    assert process.exit_code is None
    assert how_it_ended(process) == "stopped answering"


def test_a_killed_process_is_known_to_have_ended(process: WorkerProcess) -> None:
    process.kill()
    assert process.wait(DEADLINE_S)
    assert not process.is_alive()
    is_child = isinstance(process, ChildWorker)
    assert process.exit_code == (-signal.SIGKILL if is_child else None)
    assert how_it_ended(process) == ("was killed by SIGKILL" if is_child else "ended")
    process.kill()
    process.close()
    process.close()
    process.kill()
    assert process.wait(0.0)


def test_a_child_that_ended_by_itself_tells_its_exit_code() -> None:
    worker = ChildWorker(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    assert worker.wait(DEADLINE_S)
    assert how_it_ended(worker) == "ended with exit code 3"
