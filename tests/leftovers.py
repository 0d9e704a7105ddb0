"""Ending the workers that killed training processes of the tests leave behind, with their memory.

A worker lingers for minutes after its trainer was killed. Those of one test process are told from
others by a mark in their environment; SIGTERM ends only workers that linger.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

MARK = "CHECKFREQ_TESTS_OF"


def mark() -> None:
    """All workers that descend from this process are its own from now on."""
    os.environ[MARK] = str(os.getpid())


def workers() -> Iterator[int]:
    """Process ids of this test process's workers, lingering or not."""
    mine = f"{MARK}={os.getpid()}".encode()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended, or is not ours to look at
            if (
                process.name.isdigit()
                and b"# checkfreq.persist.worker" in (process / "cmdline").read_bytes()
                and mine in (process / "environ").read_bytes().split(b"\0")
            ):
                yield int(process.name)


def end_lingering() -> None:
    """Tell those that linger to end."""
    for pid in workers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
