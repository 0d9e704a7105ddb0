"""A worker's process: a child, and one that an earlier trainer started."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from checkfreq.persist.process import AdoptedWorker, ChildWorker, WorkerProcess, how_it_ended

DEADLINE_S = 120.0


@pytest.mark.parametrize("is_child", [True, False], ids=["child", "adopted"])
def test_a_process_that_runs_is_told_from_one_that_was_killed(is_child: bool) -> None:
    with subprocess.Popen(["sleep", "3600"]) as popen:
        process: WorkerProcess = ChildWorker(popen)
        if not is_child:
            process = AdoptedWorker(popen.pid, os.pidfd_open(popen.pid))
        assert not process.wait(0.0)
        assert process.exit_code is None
        assert how_it_ended(process) == "stopped answering"
        process.kill()
        assert process.wait(DEADLINE_S)
        assert process.exit_code == (-signal.SIGKILL if is_child else None)
        assert how_it_ended(process) == ("was killed by SIGKILL" if is_child else "ended")
        for end in (process.kill, process.close, process.close, process.kill):
            end()
        assert process.wait(0.0)


def test_a_child_that_ended_by_itself_tells_its_exit_code() -> None:
    worker = ChildWorker(subprocess.Popen(["false"]))
    assert worker.wait(DEADLINE_S)
    assert how_it_ended(worker) == "ended with exit code 1"
