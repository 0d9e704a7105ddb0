"""A second load on this machine during a ``with`` block: CPU hogs and a disk writer.

    with Load(folder, hogs=2, mib=256):
        ...

Child processes without torch. They end with the block, or when their parent is gone.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_ROOT = Path(__file__).resolve().parents[2]
_TURNS = 100_000  # of a hog, between two checks for its parent
_MIB = 1 << 20
_CHUNK_BYTES = 8 * _MIB


class Load:
    """``hogs`` processes that compute, and one that repeatedly writes and syncs ``mib``."""

    def __init__(self, folder: Path, *, hogs: int, mib: int) -> None:
        self._commands = [["hog"]] * hogs + (
            [["write", str(folder / "load"), str(mib)]] * (mib > 0)
        )
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Load:
        for arguments in self._commands:
            command = [sys.executable, "-m", "benchmarks.lab.load", *arguments]
            self._children.append(subprocess.Popen(command, cwd=_ROOT))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()


def hog() -> None:
    """Compute until the parent is gone."""
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(_TURNS))


def write(path: Path, *, mib: int) -> None:
    """Repeatedly write and sync a file until the parent is gone, with direct I/O if possible.

    Writes through the page cache would load the CPU more than the disk.
    """
    parent = os.getppid()
    fd = _open(path)
    with mmap.mmap(-1, _CHUNK_BYTES) as chunk:
        while os.getppid() == parent:
            for index in range(mib * _MIB // _CHUNK_BYTES):
                os.pwrite(fd, chunk, index * _CHUNK_BYTES)
            os.fdatasync(fd)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # tmpfs and some network mounts refuse it
        return os.open(path, flags, 0o600)


if __name__ == "__main__":
    if sys.argv[1] == "hog":
        hog()
    else:
        write(Path(sys.argv[2]), mib=int(sys.argv[3]))
