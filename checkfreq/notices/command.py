"""Runs one of a scheduler's commands for at most a given time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

_END_S = 1.0


@dataclass(frozen=True, slots=True)
class Output:
    """How a command ended. ``code`` None: it is not there, or it took too long."""

    code: int | None
    out: str
    error: str

    @property
    def succeeded(self) -> bool:
        """Whether it ended well."""
        return self.code == 0


def run_command(argv: Sequence[str], *, timeout_s: float) -> Output:
    """Run ``argv`` in a session of its own, all of which is killed after ``timeout_s``.

    It starts with SIGTERM blocked: a scheduler that ends the job signals this command too, which
    may be the very one that asked for it (``scontrol requeue``), before it could say so.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return Output(None, "", f"{argv[0]}: {error.strerror or error}")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        out, text = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return Output(None, "", f"{argv[0]} did not answer within {timeout_s:g} s")
    return Output(process.returncode, out, text.strip())


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the whole session: a child that lives on would keep the pipes open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
        process.communicate(timeout=_END_S)
