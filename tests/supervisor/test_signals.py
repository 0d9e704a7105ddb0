"""Signals: what is passed on, and what ends the supervision."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.supervisor.supervised import DEADLINE_S, RUN, Supervised

#: Notes each signal, and goes on waiting until one of them says to end.
LISTEN = """
def handle(number, frame):
    note(signal.Signals(number).name)
    number == {last} and sys.exit({status})

for number in {numbers}:
    signal.signal(number, handle)
note("ready")
while True:
    signal.pause()
"""


def listening(*numbers: signal.Signals, status: int = 1) -> str:
    return LISTEN.format(
        numbers=[int(number) for number in numbers], last=int(numbers[-1]), status=status
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_end_is_passed_on_and_is_the_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = Supervised(
        tmp_path,
        listening(number, status=9),
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # as outside nohup
    )
    run.wait_for("ready")
    run.send(number)
    assert run.end() == (9, [f"told to stop by {number.name}: exit status 9"])


@pytest.mark.more
def test_a_second_sigterm_ends_a_script_that_hangs(tmp_path: Path) -> None:
    hangs = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); note('ready')\nwhile True: signal.pause()"
    )
    run = Supervised(tmp_path, hangs)
    run.wait_for("ready")
    end_s = time.monotonic() + DEADLINE_S
    while run.process.poll() is None and time.monotonic() < end_s:
        run.send(signal.SIGTERM)
        time.sleep(0.2)
    status, said = run.end()
    assert status == 128 + signal.SIGKILL
    assert re.fullmatch(r"SIGTERM, \d+ s after SIGTERM: killing the script", said[0])
    assert said[1] == "told to stop by SIGTERM: exit by SIGKILL"


def test_other_signals_are_passed_on_and_end_nothing(tmp_path: Path) -> None:
    program = listening(signal.SIGUSR1, signal.SIGUSR2)
    second = "if count == 2:\n    note('second')\n    signal.pause()\n"
    run = Supervised(tmp_path, second + program)
    run.wait_for("ready")
    run.send(signal.SIGUSR1)
    run.wait_for("SIGUSR1")
    run.send(signal.SIGUSR2)
    run.wait_for("run", times=2)
    run.wait_for("second")
    run.send(signal.SIGUSR1)  # which it dies of now
    status, said = run.end()
    assert status == 128 + signal.SIGUSR1
    assert said[0] == "restart 1 after exit status 1"
    assert said[-1] == "ended by the SIGUSR1 that was passed on: exit by SIGUSR1"


def test_a_signal_in_the_pause_ends_it(tmp_path: Path) -> None:
    run = Supervised(tmp_path, "sys.exit(5)", stdin=subprocess.PIPE)
    assert run.process.stderr is not None
    while "starting it again in" not in run.process.stderr.readline():
        pass
    run.send(signal.SIGTERM)
    assert run.end() == (143, ["told to stop by SIGTERM before the next start: exit status 5"])
    assert run.notes() == ["run"] * 2


def test_from_the_keyboard_the_script_gets_a_signal_once(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    program = listening(signal.SIGINT, signal.SIGTERM, status=0)
    run = Supervised(
        tmp_path,
        program,
        stdin=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    run.wait_for("ready")
    os.write(ours, b"\x03")
    run.wait_for("SIGINT")
    run.send(signal.SIGTERM)
    assert run.end() == (0, ["told to stop by SIGINT: exit status 0"])
    os.close(ours)
    assert run.notes().count("SIGINT") == 1


def test_the_script_gets_signals_streams_and_descriptors_as_from_a_shell() -> None:
    program = """
import os, sys
for line in open("/proc/self/status"):
    if line.startswith(("SigBlk", "SigIgn", "SigCgt")):
        print(line[:7], int(line[7:], 16) & (1 << 31) - 1)  # the next two are the C library's own
print(sorted(set(os.listdir("/proc/self/fd"))), os.getcwd(), sys.argv, sys.stdin.read())
print(os.getpgid(0) == int(os.environ["GROUP"]))
"""
    command = [sys.executable, "-c", program, "one", "two"]
    environ = {**os.environ, "GROUP": str(os.getpgid(0))}
    ignoring = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    given: dict[str, Any] = {"input": "typed", "env": environ, "preexec_fn": ignoring}
    direct, under = (
        subprocess.run(whole, capture_output=True, text=True, check=True, **given).stdout
        for whole in (command, [*RUN, "--", *command])
    )
    assert under == direct
