"""Processes that outlive the script: reaped, and waited for while they write."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.supervisor.supervised import AS_PID_1, Supervised, can_be_pid_1

#: Leaves behind a process that ends as soon as there is a file ``go``.
ORPHAN = """
def until_told():
    while not (here / "go").exists():
        time.sleep(0.01)
"""

#: The orphan holds the directory's lock as the worker of a killed trainer does.
WORKER = """
from checkfreq.persist.lock import DirectoryLock

store, told, step = restored()
trainer = os.getpid()
if os.fork() == 0:
    os.setsid()
    for stream in (1, 2):  # as a worker has it: nobody waits for it to close them
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    lock = DirectoryLock(chk_dir)
    lock.acquire(timeout_s=9, owner_pid={trainer}, on_wait=print, give_up=lambda s: False)
    note("locked")
    until_told()
    commit(store, 8)
    note("written")
    os._exit(0)
while "locked" not in notes():
    time.sleep(0.01)
die()
"""


def test_a_process_that_loses_its_parent_is_reaped(tmp_path: Path) -> None:
    program = (
        ORPHAN
        + """
if os.fork() == 0:
    if os.fork() == 0:
        note(f"orphan {os.getpid()}")
        until_told()
    os._exit(0)
os.wait()
while not any(line.startswith("orphan") for line in notes()):
    time.sleep(0.01)
orphan = int([line for line in notes() if line.startswith("orphan")][0].split()[1])
note("parent " + Path(f"/proc/{orphan}/stat").read_text().rpartition(")")[2].split()[1])
note(f"expected {os.getppid()}")
(here / "go").touch()
while Path(f"/proc/{orphan}").exists():  # a zombie too
    time.sleep(0.01)
"""
    )
    run = Supervised(tmp_path, program)
    assert run.end()[0] == 0
    given_to, supervisor = (line.split()[1] for line in run.notes()[-2:])
    assert given_to == supervisor


def test_a_worker_that_still_writes_is_waited_for(tmp_path: Path) -> None:
    program = ORPHAN + WORKER.format(trainer="trainer")
    run = Supervised(tmp_path, program, "--max-restarts=0")
    assert run.process.stderr is not None
    assert f"waiting for what is still being written to {tmp_path / 'chk'}" in (
        run.process.stderr.readline()
    )
    (tmp_path / "go").touch()
    assert run.end()[0] == 137
    assert run.notes()[-1] == "written"


def test_a_signal_ends_the_wait_for_a_worker(tmp_path: Path) -> None:
    program = ORPHAN + WORKER.format(trainer="trainer")
    run = Supervised(tmp_path, program, "--max-restarts=0")
    assert run.process.stderr is not None
    run.process.stderr.readline()
    run.send(signal.SIGTERM)
    status, said = run.end()
    (tmp_path / "go").touch()
    assert status == 137
    assert said[0].startswith("not waiting any longer for what is written to")


def test_a_worker_of_somebody_else_is_not_waited_for(tmp_path: Path) -> None:
    program = ORPHAN + WORKER.format(trainer=os.getpid())
    run = Supervised(tmp_path, program, "--max-restarts=0")
    status, said = run.end()
    (tmp_path / "go").touch()
    assert (status, said) == (137, ["giving up after 0 restarts: exit by SIGKILL at step 0"])


def test_as_pid_1_signals_are_passed_on(tmp_path: Path) -> None:
    if not can_be_pid_1():
        pytest.skip("namespaces of processes cannot be made here")
    program = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); note('ready'); signal.pause()"
    )
    run = Supervised(tmp_path, program, wrapper=AS_PID_1)
    run.wait_for("ready")
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
    os.kill(int(children.split()[0]), signal.SIGTERM)
    assert run.end() == (75, ["told to stop by SIGTERM: exit status 75"])
