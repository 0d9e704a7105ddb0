"""A second user of this machine, and folders that both may enter. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

#: The user, and the group, that has nothing.
NOBODY = 65534
_DEADLINE_S = 240.0


def require_another_user() -> None:
    """Skip the test where this process cannot start one as somebody else."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("being another user needs root, and setpriv of util-linux")


def as_another_user(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user without rights of any kind; its output and its status."""
    require_another_user()
    who = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return subprocess.run(
        ["setpriv", *who, *command], capture_output=True, text=True, timeout=_DEADLINE_S
    )


@contextlib.contextmanager
def public_folder(mode: int = 0o755) -> Iterator[Path]:
    """A folder that others may enter: pytest's own are closed to them."""
    require_another_user()
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, mode)
        yield Path(name)


@contextlib.contextmanager
def another_effective_user() -> Iterator[None]:
    """This process has another user's rights, as far as it makes system calls, and gets them back.

    For code of ours: that user may read neither this interpreter nor its packages.
    """
    require_another_user()
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
