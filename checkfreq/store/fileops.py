"""Every path operation of commit and recovery, and every fsync of the project.

`FileOps` is the contract, `LocalFileOps` the real one; `checkfreq.testing` has one in memory
that forgets what was not synced, and the suite both pass. Nothing here decides an order:
that is `store.py`. What an operation promises after a power cut:

* file contents and length: only after `sync_file`, or a payload's `datasync`;
* an entry (created, renamed, removed): only after `sync_dir` of the directory it is in.

Payloads are written with direct I/O, which costs a tenth of the processor time of buffered
writes and leaves the page cache to the data loader. Where it is refused the file goes on
buffered, synced in bounded pieces. `pwrite` and `preadinto` may be called by many threads.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from checkfreq.types import round_up_to_page

_NO_PREALLOCATION = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class PayloadFile(Protocol):
    """A file being written once, in any order, by any number of threads."""

    @property
    def direct(self) -> bool:
        """Whether writes still bypass the page cache."""

    def pwrite(self, view: memoryview, offset: int) -> None:
        """Write the whole of ``view`` at ``offset``.

        Direct I/O wants the view's address, its length and ``offset`` in multiples of
        ``PAGE_BYTES``; anything else turns the file to buffered writes. Raises OSError.
        """

    def truncate(self, num_bytes: int) -> None:
        """Cut the file to its exact length."""

    def datasync(self) -> None:
        """Make contents and length durable, through the descriptor that wrote them."""

    def close(self) -> None:
        """Let the file go, synced or not; closing twice is harmless."""


class ReadFile(Protocol):
    """A file being read, by any number of threads."""

    @property
    def size(self) -> int:
        """Length in bytes when it was opened."""

    @property
    def direct(self) -> bool:
        """Whether reads still bypass the page cache."""

    def preadinto(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset``; bytes read, fewer than asked only at the end.

        The alignment rule is that of `PayloadFile.pwrite`. Raises OSError.
        """

    def close(self) -> None:
        """Let the file go; closing twice is harmless."""


class FileOps(Protocol):
    """What the store asks of a file system. Every method raises OSError."""

    def mkdir(self, path: Path, *, parents: bool = False) -> None:
        """Make a directory; an existing one is FileExistsError unless ``parents``."""

    def listdir(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""

    def exists(self, path: Path) -> bool:
        """Whether the path leads to something."""

    def is_dir(self, path: Path) -> bool:
        """Whether the path leads to a directory."""

    def file_size(self, path: Path) -> int:
        """Length of a regular file in bytes; IsADirectoryError for a directory."""

    def read_bytes(self, path: Path) -> bytes:
        """The whole file."""

    def write_file(self, path: Path, data: bytes) -> None:
        """Create or overwrite a small file; nothing of it is durable yet."""

    def sync_file(self, path: Path) -> None:
        """Make a file's contents and length durable."""

    def sync_dir(self, path: Path) -> None:
        """Make a directory's entries durable."""

    def rename(self, src: Path, dst: Path) -> None:
        """Move an entry, atomically; an existing ``dst`` is FileExistsError."""

    def unlink(self, path: Path) -> None:
        """Remove a file."""

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all it holds; a crash can leave part of it."""

    def replace_file(self, path: Path, data: bytes) -> None:
        """Put ``data`` under a name in one step: readers see the old or the new, whole."""

    def append_line(self, path: Path, line: str) -> None:
        """Append a line, after ending a last line that an earlier crash tore."""

    def free_bytes(self, path: Path) -> int:
        """Bytes that this process may still write to the file system of ``path``."""

    def create_payload(self, path: Path, *, num_bytes: int) -> PayloadFile:
        """Create a file of about ``num_bytes``; FileExistsError if it is there already."""

    def open_for_read(self, path: Path) -> ReadFile:
        """Open an existing file."""


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The calls that devices refuse, shorten or fail; tests put their own in their place."""

    open: Callable[[Path, int, int], int] = os.open
    pwrite: Callable[[int, memoryview, int], int] = os.pwrite
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    fdatasync: Callable[[int], None] = os.fdatasync
    fsync: Callable[[int], None] = os.fsync


class LocalFileOps:
    """`FileOps` over the operating system.

    ``direct=False`` never tries direct I/O; ``piece_bytes`` is the most that a buffered
    payload leaves unsynced.
    """

    def __init__(
        self,
        *,
        direct: bool = True,
        piece_bytes: int = 32 << 20,
        calls: SystemCalls = SystemCalls(),
    ) -> None:
        self._direct = direct
        self._piece_bytes = piece_bytes
        self._calls = calls

    def mkdir(self, path: Path, *, parents: bool = False) -> None:
        path.mkdir(parents=parents, exist_ok=parents)

    def listdir(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def exists(self, path: Path) -> bool:
        return path.exists()

    def is_dir(self, path: Path) -> bool:
        return path.is_dir()

    def file_size(self, path: Path) -> int:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return path.stat().st_size

    def read_bytes(self, path: Path) -> bytes:
        return path.read_bytes()

    def write_file(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def sync_file(self, path: Path) -> None:
        with path.open("rb") as file:
            self._calls.fsync(file.fileno())

    def sync_dir(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._calls.fsync(fd)
        except OSError as error:
            # A file system without the notion says EINVAL: there is nothing to wait for.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(fd)

    def rename(self, src: Path, dst: Path) -> None:
        # rename(2) would replace an empty directory. Looking first is enough: only the
        # process that holds the directory's lock renames anything in it.
        if os.path.lexists(dst):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(dst))
        os.rename(src, dst)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_tree(self, path: Path) -> None:
        with os.scandir(path) as found:
            entries = list(found)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(Path(entry.path))
            else:
                os.unlink(entry.path)
        os.rmdir(path)

    def replace_file(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.name}.new")
        self.write_file(temporary, data)
        self.sync_file(temporary)  # or a power cut may leave the new name with no bytes
        os.replace(temporary, path)

    def append_line(self, path: Path, line: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "r+b", buffering=0) as file:
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            file.write(f"{chr(10) if torn else ''}{line}\n".encode())

    def free_bytes(self, path: Path) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def create_payload(self, path: Path, *, num_bytes: int) -> PayloadFile:
        fd, direct = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        if direct and num_bytes:
            self._preallocate(fd, num_bytes)
        return _LocalPayload(fd, direct, self._calls, self._piece_bytes)

    def open_for_read(self, path: Path) -> ReadFile:
        fd, direct = self._open(path, os.O_RDONLY)
        return _LocalRead(fd, direct, self._calls)

    def _open(self, path: Path, flags: int) -> tuple[int, bool]:
        flags |= os.O_CLOEXEC
        if self._direct:
            try:
                return self._calls.open(path, flags | os.O_DIRECT, 0o644), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            # Linux makes the file before it finds that it cannot be opened that way.
            flags &= ~os.O_EXCL
        return self._calls.open(path, flags, 0o644), False

    def _preallocate(self, fd: int, num_bytes: int) -> None:
        """Claim the blocks now: a full disk is found before a gigabyte has been written."""
        try:
            self._calls.fallocate(fd, 0, round_up_to_page(num_bytes))
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                os.close(fd)
                raise


class _Descriptor:
    """An open file that begins direct, perhaps, and can be turned to buffered I/O."""

    def __init__(self, fd: int, direct: bool, calls: SystemCalls) -> None:
        self._fd = fd
        self._direct = direct
        self._calls = calls
        self._lock = threading.Lock()

    @property
    def direct(self) -> bool:
        return self._direct

    def close(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _refused(self, error: OSError, was_direct: bool) -> bool:
        """Turn to buffered I/O if direct I/O was the reason for ``error``."""
        if error.errno != errno.EINVAL or not was_direct:
            return False
        # Another thread may have turned it already: then trying once more is right too.
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False
        return True


class _LocalPayload(_Descriptor):
    def __init__(self, fd: int, direct: bool, calls: SystemCalls, piece_bytes: int) -> None:
        super().__init__(fd, direct, calls)
        self._piece_bytes = piece_bytes
        self._unsynced_bytes = 0

    def pwrite(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = self._write_some(view, offset)
            view = view[count:]
            offset += count

    def _write_some(self, view: memoryview, offset: int) -> int:
        was_direct = self._direct
        try:
            count = self._calls.pwrite(self._fd, view, offset)
        except OSError as error:
            if not self._refused(error, was_direct):
                raise
            return 0
        if not was_direct:
            self._bound_unsynced(count)
        return count

    def _bound_unsynced(self, count: int) -> None:
        """Sync every so many bytes, so that no sync at the end stalls the whole machine."""
        with self._lock:
            self._unsynced_bytes += count
            full = self._unsynced_bytes >= self._piece_bytes
            if full:
                self._unsynced_bytes = 0
        if full:
            self.datasync()

    def truncate(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)

    def datasync(self) -> None:
        self._calls.fdatasync(self._fd)
        if not self._direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


class _LocalRead(_Descriptor):
    def __init__(self, fd: int, direct: bool, calls: SystemCalls) -> None:
        super().__init__(fd, direct, calls)
        self._size = os.fstat(fd).st_size

    @property
    def size(self) -> int:
        return self._size

    def preadinto(self, view: memoryview, offset: int) -> int:
        # Asking again after the last byte would be unaligned, hence a refusal: stop by size.
        wanted = min(len(view), max(self._size - offset, 0))
        done = 0
        while done < wanted:
            count = self._read_some(view[done:], offset + done)
            if count == 0:
                break
            done += max(count, 0)
        return min(done, wanted)

    def _read_some(self, view: memoryview, offset: int) -> int:
        was_direct = self._direct
        try:
            return self._calls.preadv(self._fd, [view], offset)
        except OSError as error:
            if not self._refused(error, was_direct):
                raise
            return -1  # nothing read, ask again
