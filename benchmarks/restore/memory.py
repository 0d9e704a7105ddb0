"""The memory of a process: how much it held at its peak, and a cgroup that leaves it little.

Both versions of cgroups. Making one needs root; in a container, that of the container.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_REMOVED_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.002


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of this process in memory: now, the most so far, and how many now are shared memory."""

    now: int
    peak: int
    shared: int

    @classmethod
    def read(cls) -> Resident:
        """As the kernel counts them."""
        lines = Path("/proc/self/status").read_text().splitlines()
        rows = dict(line.split(":", 1) for line in lines)
        return cls(*(int(rows[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM", "RssShmem")))


class PrivatePeak:
    """The most private memory in use inside the block, in bytes, looked at every few milliseconds.

    For what maps memory that other processes hold, which the kernel's own mark includes.
    """

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.num_bytes = _private()

    def __enter__(self) -> PrivatePeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            self.num_bytes = max(self.num_bytes, _private())


def _private() -> int:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def forget_peak() -> None:
    """From now on the peak is of what follows."""
    Path("/proc/self/clear_refs").write_text("5")


class Group:
    """A memory cgroup of this benchmark; `make` finds out whether there can be one."""

    def __init__(self, folder: Path, *, is_v2: bool) -> None:
        self._folder, self._is_v2 = folder, is_v2

    @classmethod
    def make(cls, name: str) -> Group:
        """Raises OSError, for the last place tried, where none can be made."""
        error: OSError | None = None
        for parent, is_v2 in _parents():
            group = cls(parent / name, is_v2=is_v2)
            try:
                if is_v2:
                    (parent / "cgroup.subtree_control").write_text("+memory")
                (parent / name).mkdir(exist_ok=True)
                group._limit_file.read_text()
            except OSError as found:
                error = found
                with contextlib.suppress(OSError):
                    (parent / name).rmdir()
            else:
                return group
        raise error or OSError(f"no memory cgroups in {_ROOT}")

    def join(self) -> None:
        """Memory that this process touches from now on counts."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def leave_only(self, num_bytes: int) -> None:
        """Limit the group to ``num_bytes`` more than it holds, page cache not counted."""
        limit = self._held() + num_bytes
        self._limit_file.write_text(str(limit))
        if self._is_v2:
            with contextlib.suppress(OSError):  # no swap here
                (self._folder / "memory.swap.max").write_text("0")

    def _held(self) -> int:
        usage = "memory.current" if self._is_v2 else "memory.usage_in_bytes"
        rows = (self._folder / "memory.stat").read_text().splitlines()
        stat = {name: int(value) for name, value in (row.split() for row in rows)}
        cached = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        return int((self._folder / usage).read_text()) - cached

    @property
    def _limit_file(self) -> Path:
        return self._folder / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")

    def remove(self) -> None:
        """Once its processes are gone; raises TimeoutError if they stay."""
        deadline_s = time.monotonic() + _REMOVED_WITHIN_S
        while True:
            try:
                self._folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{self._folder} is still in use") from None
                time.sleep(0.05)
            else:
                return


def _parents() -> list[tuple[Path, bool]]:
    """Where a group might be made: this process's own place first, then the top."""
    places = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            places += [(_ROOT / "memory" / path.strip("/"), False), (_ROOT / "memory", False)]
        elif not controllers and (_ROOT / "cgroup.controllers").exists():
            places += [(_ROOT / path.strip("/"), True), (_ROOT, True)]
    return places
