"""What the file system of a directory gives: tried with the store's own file operations.

A folder ``.tmp-doctor-...`` is made there, used and removed. The store removes such folders when a
run begins, so that one which a killed doctor left goes with the next run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import socket
import stat
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from checkfreq.config import CFConfig
from checkfreq.doctor.findings import Finding, Status
from checkfreq.store.fileops import UNKNOWN_BYTES, LocalFileOps
from checkfreq.store.mounts import mount_of
from checkfreq.types import size_text

_NUM_SYNCS = 20
#: A disk that is slower than this is measured with less data.
_LONGEST_S = 10.0
#: Half a second for each of the some ten syncs of a commit.
_SLOW_SYNC_S = 0.05
#: A flash disk takes longer to answer at all.
_FAST_SYNC_S = 30e-6
_SLOW_BYTES_PER_S = 100e6
_MEMORY = ("tmpfs", "ramfs")
_KINDS = (
    (_MEMORY, Status.WARNING, "memory: it is lost at a reboot, and counts as used",
     "Take a directory on a disk."),
    (("overlay", "aufs"), Status.WARNING, "a container's own layer: it goes with the container",
     "Mount a volume, and put the checkpoints there."),
    (("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "smb3", "cifs", "wekafs"),
     Status.GOOD, "network storage: it outlives this machine, and other users share its speed", ""),
    (("9p", "virtiofs"), Status.NOTE, "a folder of the machine around this one, which decides what "
     "a sync is worth", "Ask whoever runs it whether syncs reach the disk."),
    (("ext4", "xfs", "btrfs", "zfs", "f2fs", "ext3"), Status.GOOD,
     "a disk of this machine: it survives a kill and a reboot, not the loss of the machine", ""),
)  # fmt: skip


class Storage:
    """Tries one directory, which must exist; ``num_bytes`` are written and read."""

    def __init__(self, directory: Path, *, num_bytes: int) -> None:
        self.directory = directory
        self._ops = LocalFileOps(directory)
        self._folder = directory / f".tmp-doctor-{os.getpid()}-{time.time_ns() % 10**9}"
        self._num_bytes = num_bytes
        mount = mount_of(directory)
        self._kind = mount.fs_type if mount else "unknown"

    def kind(self) -> Iterator[Finding]:
        """What it is."""
        name = self._kind
        status, means, mend = Status.NOTE, "a kind of which nothing is known here", ""
        for names, *known in _KINDS:
            if name in names:
                status, means, mend = known  # type: ignore[assignment]
        if name.startswith("fuse"):
            means = "a file system in user space: whether a sync is durable depends on it"
        yield Finding("file_system", status, name, f"It is {means}.", mend, {"type": name})

    def access(self) -> Iterator[Finding]:
        """Who else may write there: whoever may, may remove checkpoints and put others there."""
        own, others, real = {0, os.geteuid()}, [], self.directory.resolve()
        for up, folder in enumerate((real, *real.parents)):
            status, name = os.stat(folder), "/".join([".."] * up) or "the directory"
            if status.st_uid not in own:
                others.append(f"{name} belongs to user {status.st_uid}")
            # In a sticky folder above, what is ours can be neither removed nor renamed.
            if status.st_mode & stat.S_IWOTH and not (up and status.st_mode & stat.S_ISVTX):
                others.append(f"all users may write to {name}")
        yield Finding(
            "access",
            Status.WARNING if others else Status.GOOD,
            "; ".join(others) or "only its owner, its group and root may write to it",
            "Who may write to the directory, or to one above it, may remove checkpoints and put "
            "others in their place.",
            "chmod o-w on each, or take a directory below your own." if others else "",
        )

    def room(self) -> Iterator[Finding]:
        """What is free."""
        free = self._ops.free_bytes(self.directory)
        if free == UNKNOWN_BYTES:
            yield Finding("room", Status.NOTE, "not told", "The file system reports no sizes.")
            return
        is_short = free < 4 * self._num_bytes
        yield Finding(
            "room",
            Status.WARNING if is_short else Status.GOOD,
            f"{size_text(free)} free",
            "A checkpoint needs its size, and the default retention keeps up to 28. A full disk "
            "does not end a run: periodic checkpoints fail until there is room.",
            "Make room, or keep fewer: CFManager(retention=KeepLast(3))." if is_short else "",
            {"free_bytes": free},
        )

    def all(self) -> Iterator[Finding]:
        """Everything that needs a folder of our own there, which is removed at the end."""
        try:
            self._ops.mkdir(self._folder)
        except OSError as error:
            yield Finding(
                "writable",
                Status.PROBLEM,
                error.strerror or str(error),
                "Nothing can be written here: a run would stop at CFManager(...).",
                "Mount it read-write, change its owner or mode, or take another directory.",
                {"errno": error.errno},
            )
            return
        try:
            yield from self._commit_steps()
            yield from self._speed()
            yield from self._syncs()
        finally:
            with contextlib.suppress(OSError):
                self._ops.remove_tree(self._folder)

    # ---- what a commit needs

    def _commit_steps(self) -> Iterator[Finding]:
        yield self._step(
            "rename", self._rename, Status.WARNING,
            "A commit renames a directory. Where that is refused, steps set aside are copied.",
            "Take a directory on a mounted volume, not in a layer of overlayfs.",
        )  # fmt: skip
        yield self._step(
            "lock", self._lock, Status.PROBLEM,
            "One run at a time may write: its worker holds a lock (flock) on the directory.",
            "Mount it with locks: NFS version 4, Lustre with -o flock.",
        )  # fmt: skip
        yield self._step(
            "hard_link", self._link, Status.WARNING,
            "Frozen parameters are written once and linked into later checkpoints.",
            "Without links they are written each time. Take a file system with hard links.",
        )  # fmt: skip
        yield self._step(
            "symbolic_link", self._symlink, Status.NOTE,
            "An AtomicDirectory points a link at its newest folder. Checkpoints of a CFManager "
            "need none: latest is a file.",
            "Write files of your own with a CFManager, or take a file system with links.",
        )  # fmt: skip
        yield self._step(
            "socket", self._socket, Status.WARNING,
            "A worker that outlives its trainer offers its memory to the next run here.",
            "Without it a killed run restores from the disk.",
        )  # fmt: skip

    @staticmethod
    def _step(
        name: str, attempt: Callable[[], None], status: Status, means: str, mend: str
    ) -> Finding:
        try:
            attempt()
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "")
            return Finding(name, status, f"refused: {error.strerror} ({code})", means, mend)
        return Finding(name, Status.GOOD, "works", means)

    def _rename(self) -> None:
        self._ops.mkdir(self._folder / "before")
        self._ops.sync_dir(self._folder)
        self._ops.rename(self._folder / "before", self._folder / "after")
        self._ops.sync_dir(self._folder)

    def _lock(self) -> None:
        fd = self._ops.open_to_lock(self._folder / "lock")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)

    def _link(self) -> None:
        self._ops.write_file(self._folder / "first", b"x")
        self._ops.link(self._folder / "first", self._folder / "second")

    def _symlink(self) -> None:
        self._ops.point_link(self._folder / "latest", "first")

    def _socket(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            self._ops.bind_socket(self._folder / "socket", sock)

    # ---- speed

    def _speed(self) -> Iterator[Finding]:
        config = CFConfig()
        with _Block(config.write_chunk_bytes) as block:
            wrote = self._write(block, config.writer_threads)
            read = self._read(block, config.writer_threads)
        direct = wrote.direct and read.direct
        yield Finding(
            "direct_io",
            Status.GOOD if direct else Status.NOTE,
            f"{_yes(wrote.direct)} for writes, {_yes(read.direct)} for reads",
            "Direct I/O takes a tenth of the processor time and leaves the page cache to the data "
            "loader."
            + (
                "" if direct else " Without it, checkfreq writes through the cache and syncs often."
            ),
            ""
            if direct
            else "ext4, xfs and NFS have it; tmpfs, and some overlays and FUSE do not.",
            {"writes": wrote.direct, "reads": read.direct},
        )
        yield self._rate(
            "write_speed", wrote, "A checkpoint is durable after about its size by this; no "
            "interval is shorter, so it also bounds what a kill can lose.",
        )  # fmt: skip
        cached = "" if read.direct else " This was read from the page cache: it says little."
        yield self._rate("read_speed", read, f"A restore takes at least its size by this.{cached}")

    @staticmethod
    def _rate(name: str, rate: _Rate, means: str) -> Finding:
        is_slow = rate.bytes_per_s < _SLOW_BYTES_PER_S
        return Finding(
            name,
            Status.WARNING if is_slow else Status.GOOD,
            f"{rate.bytes_per_s / 1e9:.2f} GB/s ({size_text(rate.num_bytes)} in "
            f"{rate.seconds:.2f} s)",
            means,
            "Take a faster disk; checkfreq plan DIR --storage-factor 4 says what it would be worth."
            if is_slow
            else "",
            {"bytes_per_s": rate.bytes_per_s, "num_bytes": rate.num_bytes, "seconds": rate.seconds},
        )

    def _write(self, block: _Block, num_threads: int) -> _Rate:
        payload = self._ops.create_payload(self._folder / "payload", num_bytes=self._num_bytes)
        try:
            start_s = time.perf_counter()
            done = _in_pieces(block, self._num_bytes, num_threads, payload.pwrite, start_s)
            payload.truncate(done)
            payload.datasync()
            return _Rate(done, time.perf_counter() - start_s, payload.direct)
        finally:
            payload.close()

    def _read(self, block: _Block, num_threads: int) -> _Rate:
        file = self._ops.open_for_read(self._folder / "payload")
        blocks = [_Block(block.num_bytes) for _ in range(num_threads)]
        try:
            free = list(blocks)

            def read(view: memoryview, offset: int) -> None:
                mine = free.pop()
                file.preadinto(mine.view[: len(view)], offset)
                free.append(mine)

            start_s = time.perf_counter()
            done = _in_pieces(block, file.size, num_threads, read, start_s)
            return _Rate(done, time.perf_counter() - start_s, file.direct)
        finally:
            file.close()
            for one in blocks:
                one.close()

    def _syncs(self) -> Iterator[Finding]:
        taken = []
        for index in range(_NUM_SYNCS):
            path = self._folder / f"small-{index}"
            self._ops.write_file(path, bytes(4096))
            start_s = time.perf_counter()
            self._ops.sync_file(path)
            self._ops.sync_dir(self._folder)
            taken.append((time.perf_counter() - start_s) / 2)
            if sum(taken) > _LONGEST_S:
                break
        median_s, longest_s = statistics.median(taken), max(taken)
        status, mend = Status.GOOD, ""
        means = "A commit syncs about ten files and folders, one after the other, before it counts."
        if median_s > _SLOW_SYNC_S:
            status = Status.WARNING
            mend = (
                "Other users or a disk without a power-safe cache make it slow: take another one."
            )
        elif median_s < _FAST_SYNC_S or self._kind in _MEMORY:
            status = Status.NOTE
            means += " So short a time means that syncs reach no disk: checkpoints outlive a kill, "
            means += "and not a loss of power."
            mend = "Take a directory on a disk, or ask whoever runs the storage what a sync does."
        yield Finding(
            "sync_time",
            status,
            f"median {1e3 * median_s:.3f} ms, longest {1e3 * longest_s:.2f} ms",
            means,
            mend,
            {"median_s": median_s, "longest_s": longest_s, "num": len(taken)},
        )


@dataclass(frozen=True, slots=True)
class _Rate:
    num_bytes: int
    seconds: float
    direct: bool

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(self.seconds, 1e-9)


class _Block:
    """Page-aligned memory with random bytes, so that compression does not flatter a disk."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes)
        self._memory.write(os.urandom(num_bytes))
        self.view = memoryview(self._memory)

    def __enter__(self) -> _Block:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back."""
        self.view.release()
        self._memory.close()


def _in_pieces(
    block: _Block,
    num_bytes: int,
    num_threads: int,
    do: Callable[[memoryview, int], object],
    start_s: float,
) -> int:
    """``do`` for every piece; stops after ten seconds. Returns the bytes that were done."""
    done = 0
    with ThreadPoolExecutor(num_threads) as pool:
        while done < num_bytes and time.perf_counter() - start_s < _LONGEST_S:
            offsets = range(done, num_bytes, block.num_bytes)[: 2 * num_threads]
            list(pool.map(lambda at: do(block.view[: min(block.num_bytes, num_bytes - at)], at),
                          offsets))  # fmt: skip
            done = min(num_bytes, offsets[-1] + block.num_bytes)
    return done


def _yes(value: bool) -> str:
    return "yes" if value else "no"
