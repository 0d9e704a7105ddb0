"""The stop notice: a flag, the handlers it replaces, the ones it meets."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


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


CHILD = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
THEN = {
    "told again within its time": ("now[0] = 29.0; tell(); sys.exit(75)", 75),
    "told again while the interpreter ends": (
        # A module's attributes are cleared after the last Python handler could run.
        "class Last:\n    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, 15)\n"
        "sys.last = Last(); sys.exit(75)",
        75,
    ),
    "told again later, since it goes on": ("now[0] = 31.0; tell(); sys.exit(75)", -signal.SIGTERM),
    "starts another, which does not inherit an ignored signal": (
        f"sys.exit(-subprocess.run([sys.executable, '-c', {CHILD!r}]).returncode)",
        signal.SIGTERM,
    ),
    "forks": (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    tell()\n"
        "    os._exit(0)\n"
        "sys.exit(-os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
        signal.SIGTERM,
    ),
}


@pytest.mark.parametrize(("after", "status"), THEN.values(), ids=THEN.keys())
def test_a_process_that_was_told_to_stop_leaves_with_its_status(after: str, status: int) -> None:
    code = LEAVING.replace("{after}", after)
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert (result.returncode, result.stderr) == (status, b"")
