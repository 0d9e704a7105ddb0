"""The stop notice: a flag, the handlers it replaces, the ones it meets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from checkfreq.errors import ConfigError
from checkfreq.run.interrupt import StopNotice


@pytest.fixture(autouse=True)
def _keep_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_sets_the_flag_and_its_name() -> None:
    notice = StopNotice(["SIGUSR1", "SIGUSR2"])
    notice.install()
    assert not notice.is_set
    os.kill(os.getpid(), signal.SIGUSR2)
    assert notice.is_set
    assert notice.received == "SIGUSR2"
    notice.uninstall()
    notice.uninstall()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_an_ignored_signal_is_a_notice_while_listening_and_ignored_after() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    notice = StopNotice(["SIGUSR1"])
    notice.install()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert notice.is_set
    notice.uninstall()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    code = (
        "import os, signal\n"
        "from checkfreq.run.interrupt import StopNotice\n"
        "notice = StopNotice(['SIGHUP'])\n"
        "notice.install()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "assert not notice.is_set\n"
    )
    subprocess.run(["nohup", sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["SIGTREM", "SIGKILL", "SIGSTOP", "TERM", ""])
def test_a_name_that_cannot_be_caught_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="signals that can be caught"):
        StopNotice([name])


def test_a_handler_put_back_after_it_was_uninstalled_only_passes_the_signal_on() -> None:
    """In a process of its own: the default action of the signal is to end it."""
    code = (
        "import os, signal\n"
        "from checkfreq.run.interrupt import StopNotice\n"
        "one, two = StopNotice(['SIGTERM']), StopNotice(['SIGTERM'])\n"
        "one.install(); two.install(); one.uninstall(); two.uninstall()\n"
        "assert signal.getsignal(signal.SIGTERM) == one._handle\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert result.returncode == -signal.SIGTERM, result.stderr.decode()


#: A process that was told to stop, and by now only leaves; then ``{after}``.
LEAVING = """
import os, signal, subprocess, sys
from checkfreq.run.interrupt import StopNotice

def tell():
    os.kill(os.getpid(), signal.SIGTERM)

now = [0.0]
notice = StopNotice(["SIGTERM"], clock=lambda: now[0])
notice.install()
tell()
notice.uninstall(has_stopped=True)
{after}
"""


def leaving(after: str) -> int:
    """Exit status of such a process."""
    code = LEAVING.replace("{after}", after)
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert not result.stderr, result.stderr.decode()
    return result.returncode


def test_a_signal_that_comes_again_once_the_run_has_stopped_changes_nothing() -> None:
    assert leaving("now[0] = 29.0; tell(); sys.exit(75)") == 75


def test_a_signal_while_the_interpreter_ends_changes_nothing() -> None:
    """A module's attributes are cleared after the last Python handler could run."""
    last = "class Last:\n    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, 15)\n"
    assert leaving(f"{last}sys.last = Last(); sys.exit(75)") == 75


def test_a_process_that_goes_on_after_its_stop_is_ended_by_a_later_signal() -> None:
    assert leaving("now[0] = 31.0; tell(); sys.exit(75)") == -signal.SIGTERM


def test_what_a_leaving_process_starts_can_be_ended() -> None:
    """A signal that is ignored would be ignored by it as well."""
    child = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    start = f"sys.exit(-subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    assert leaving(start) == signal.SIGTERM


def test_a_fork_of_a_leaving_process_can_be_ended() -> None:
    fork = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    tell()\n"
        "    os._exit(0)\n"
        "sys.exit(-os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert leaving(fork) == signal.SIGTERM
