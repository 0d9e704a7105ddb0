"""A start from a standby is a start like any other."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor.supervised import DEADLINE_S, RUN, Supervised

#: Lets the supervisor start a standby in the first run, and returns once there is one.
AWAIT = """
MARK = b"# checkfreq run: standby"

def standbys(parent):
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [pid for pid in children if MARK in Path(f"/proc/{pid}/cmdline").read_bytes()]

def await_standby():
    told = reporter_for(chk_dir, rank=0)
    told.begin(0, restored=False)
    told.pass_boundary(1)
    while not standbys(os.getppid()):
        time.sleep(0.01)

is_from_standby = MARK in Path("/proc/self/cmdline").read_bytes()
"""

FACTS = """
import json, multiprocessing, pickle, threading

class Thing:
    pass

def in_a_child(thing):
    return [type(thing).__module__, type(thing).__name__, sys.argv]

def facts():
    wanted = "SigBlk", "SigIgn", "SigCgt"
    masks = [line.split(":") for line in open("/proc/self/status") if line[:6] in wanted]
    libc = 3 << 31  # signals 32 and 33, of the C library's threads
    lines = [(name, int(mask, 16) & ~libc) for name, mask in masks]
    given = {key: value for key, value in os.environ.items() if key != "CHECKFREQ_RUN"}
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        child = pool.apply(in_a_child, (pickle.loads(pickle.dumps(Thing())),))
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "main": [__name__, __file__, __package__, __doc__, type(__loader__).__name__],
        "spec": None if __spec__ is None else [__spec__.name, __spec__.origin],
        "names": sorted(globals()),
        "is main": main.__dict__ is globals(),
        "directory": os.getcwd(),
        "environment": given,
        "flags": str(sys.flags),
        "options": [sys.warnoptions, sys._xoptions],
        "signals": lines,
        "sigint": str(signal.getsignal(signal.SIGINT)).split(" at ")[0],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "group": os.getpgid(0) == os.getpgid(os.getppid()),
        "session": os.getsid(0) == os.getsid(os.getppid()),
        "child": child,
        "threads": threading.active_count(),
        "asserts": __debug__,
        "buffering": [sys.stdout.line_buffering, sys.stdout.write_through],
    }

if __name__ == "__main__":
    (here / f"facts-{count}").write_text(json.dumps([is_from_standby, facts()]))
    if count == 1:
        await_standby()
        sys.exit(7)
"""


def with_standby(folder: Path, program: str, *options: str, **settings: Any) -> Supervised:
    return Supervised(folder, AWAIT + program, "--standby", *options, **settings)


def two_starts(run: Supervised) -> list[Any]:
    """What two runs wrote down, the second of which was the standby's."""
    status, said = run.end()
    assert status == 0, (said, run.errors)
    first, second = (json.loads((run.folder / f"facts-{n}").read_text()) for n in (1, 2))
    assert [first[0], second[0]] == [False, True]
    return [first[1], second[1]]


def test_a_script_finds_everything_as_after_a_new_start(tmp_path: Path) -> None:
    how: dict[str, Any] = {"python": ("-u", "-O"), "arguments": ["--lr", "0.1"]}
    first, second = two_starts(with_standby(tmp_path, FACTS, **how))
    assert second == first


def test_so_does_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").symlink_to(tmp_path / "script.py")
    how: dict[str, Any] = {"python": ("-m",), "named": "package.train", "arguments": ["one"]}
    first, second = two_starts(with_standby(tmp_path, FACTS, cwd=tmp_path, **how))
    assert second == first


def test_text_failure_and_exit_status_are_those_of_the_script(tmp_path: Path) -> None:
    program = """
if count == 1:
    await_standby()
    text = Path(__file__).read_text()
    Path(__file__).write_text(text.replace("first text", "second text"))
    die(signal.SIGSEGV)
raise ValueError(f"first text, standby {is_from_standby}")
"""
    run = with_standby(tmp_path, program, "--max-restarts=1")
    status, said = run.end()
    assert status == 1, run.errors
    assert "ValueError: second text, standby True" in run.errors
    assert "becoming" not in run.errors  # no frame of ours
    assert said[0].startswith("restart 1 after exit by SIGSEGV")


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def waiting(run: Supervised) -> int:
    """The process id of the standby."""
    run.wait_for("ready")
    (standby,) = (
        pid
        for pid in children(run.process.pid)
        if b"run: standby" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    return standby


def test_a_standby_runs_nothing_before_its_turn_and_ends_with_the_supervisor(
    tmp_path: Path,
) -> None:
    program = "await_standby(); note('ready'); note(f'pid {os.getpid()}'); signal.pause()"
    run = with_standby(tmp_path, program)
    standby = waiting(run)
    run.wait_until(lambda: len(run.notes()) == 3, "no process id")
    assert run.notes()[:2] == ["run", "ready"]  # it runs nothing of the script before its turn
    watched = os.pidfd_open(standby)
    run.process.kill()
    run.process.wait()
    assert select.select([watched], [], [], DEADLINE_S)[0]
    os.close(watched)
    os.kill(int(run.notes()[2].split()[1]), signal.SIGKILL)  # the script goes on
    run.end()


def test_signals_to_the_whole_group_leave_a_standby_alone(tmp_path: Path) -> None:
    program = """
signal.signal(signal.SIGUSR1, lambda *_: note("SIGUSR1"))
if count == 1:
    await_standby()
    note("ready")
    while "SIGUSR1" not in notes():
        time.sleep(0.01)
    # It is passed on by the supervisor too, which may come when Python has restored the default.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
note(f"standby {is_from_standby}")
sys.exit(count == 1)
"""
    run = with_standby(tmp_path, program, process_group=0)
    waiting(run)
    os.killpg(run.process.pid, signal.SIGUSR1)
    assert run.end()[0] == 0
    assert run.notes()[-1] == "standby True"


def test_a_standby_that_is_killed_is_said_once_and_not_missed(tmp_path: Path) -> None:
    program = """
if count == 1:
    await_standby()
    note("ready")
    while standbys(os.getppid()):
        time.sleep(0.01)
sys.exit(count < 3)
"""
    run = with_standby(tmp_path, program)
    os.kill(waiting(run), signal.SIGKILL)
    status, said = run.end()
    assert status == 0
    assert said[0] == "no standby from now on: it ended while it waited (exit by SIGKILL)"
    assert len([line for line in said if "standby" in line]) == 1


TORCH = """
import json
was_there = "torch" in sys.modules
import torch
found = {
    "random": torch.rand(3, generator=torch.manual_seed(0)).tolist(),
    "device": torch.cuda.is_initialized(),
    "threads": torch.get_num_threads(),
    "tasks": len(os.listdir("/proc/self/task")),
}
(here / f"facts-{count}").write_text(json.dumps([was_there, found]))
count == 1 and await_standby()
sys.exit(count == 1)
"""


@pytest.mark.more
def test_torch_is_imported_and_nothing_of_it_initialised(tmp_path: Path) -> None:
    first, second = two_starts(with_standby(tmp_path, TORCH))
    assert second == first
    assert first["device"] is False


def test_a_command_that_no_standby_can_become_runs_without() -> None:
    command = [*RUN, "--standby", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, input="")
    assert done.returncode == 0
    assert done.stderr.count("no standby: ") == 1
