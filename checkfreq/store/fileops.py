"""Every path operation of commit and recovery, and every fsync of the project.

`FileOps` is the contract and `LocalFileOps` its real implementation. `checkfreq.testing` has one
in memory that forgets what was not synced, and the test suite that both pass. `store.py`, not
this module, decides the order of operations. What an operation guarantees after a power cut:

* file contents and length: only after `sync_file`, or a payload's `datasync`;
* an entry (created, renamed, removed): only after `sync_dir` of the directory it is in.

A checkpoint directory is untrusted input. Entries below it are opened from a descriptor of it,
one name at a time, and a symbolic link on the way is an error. Only regular files are read and
written, and no more bytes are read than the caller allows. The path of the directory itself is
the user's choice: links in it are followed. Modes are left to the umask. A file that has another
name, as in a copy by hard links (``cp -al``), is replaced where it would be changed: only links of
committed payloads, which nobody changes, share their contents.

Payloads are written with direct I/O, which costs a tenth of the processor time of buffered
writes and leaves the page cache to the data loader. Where direct I/O is refused, the file is
written buffered and synced in bounded pieces. `pwrite` and `preadinto` may be called by many
threads.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from checkfreq.errors import ConfigError, ForeignEntryError, StorageError
from checkfreq.types import round_up_to_page

#: Default bound of `FileOps.read_bytes`.
SMALL_FILE_BYTES = 64 << 20
#: What `FileOps.free_bytes` returns where the file system reports no sizes.
UNKNOWN_BYTES = 2**63 - 1
#: Our own trees are three levels deep. The bound keeps a made-up tree from exhausting the stack.
_MOST_LEVELS = 64
_READ_BYTES = 1 << 16
#: How often a directory is emptied into which somebody else writes.
_MOST_SWEEPS = 4

_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC
_NO_SUCH = (FileNotFoundError, NotADirectoryError)
_NO_PREALLOCATION = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class Kind(enum.Enum):
    """The kind of a directory entry."""

    FILE = "a regular file"
    DIRECTORY = "a directory"
    LINK = "a symbolic link"
    OTHER = "a FIFO, socket or device"


def user_path(path: str | bytes | os.PathLike[str]) -> Path:
    """A path as a user gave it, absolute, so that a later chdir does not move it.

    A leading "~" or "~name" is a home directory, as in a shell. Raises ConfigError for "".
    """
    text = os.fsdecode(path)
    if not text:
        raise ConfigError(
            'expected a path, got "": an unset variable, perhaps? "." is the working directory'
        )
    return Path(os.path.expanduser(text)).absolute()


def user_file(path: str | bytes | os.PathLike[str]) -> Path:
    """A file to read, as a user gave it: where links lead to.

    Raises ConfigError for a FIFO, socket or device, which may have no end.
    """
    found = Path(os.path.realpath(user_path(path)))
    if (kind := LocalFileOps(found.parent).kind(found)) is Kind.OTHER:
        raise ConfigError(f"{os.fsdecode(path)} is {kind.value}: expected a regular file")
    return found


class PayloadFile(Protocol):
    """A file that is written once, in any order, by any number of threads."""

    @property
    def direct(self) -> bool:
        """Whether writes still bypass the page cache."""

    def pwrite(self, view: memoryview, offset: int) -> None:
        """Write the whole of ``view`` at ``offset``.

        Direct I/O needs the view's address, its length and ``offset`` to be multiples of
        ``PAGE_BYTES``; otherwise the file falls back to buffered writes. Raises OSError.
        """

    def truncate(self, num_bytes: int) -> None:
        """Cut the file to its exact length."""

    def datasync(self) -> None:
        """Make contents and length durable, through the descriptor that wrote them."""

    def close(self) -> None:
        """Close the file, synced or not; idempotent."""


class ReadFile(Protocol):
    """A file that is read, by any number of threads."""

    @property
    def size(self) -> int:
        """Length in bytes when it was opened."""

    @property
    def direct(self) -> bool:
        """Whether reads still bypass the page cache."""

    def preadinto(self, view: memoryview, offset: int) -> int:
        """Fill ``view`` from ``offset``; returns the bytes read, fewer only at the end of the file.

        Alignment matters as for `PayloadFile.pwrite`. Raises OSError.
        """

    def close(self) -> None:
        """Close the file; idempotent."""


@runtime_checkable
class FileInMemory(ReadFile, Protocol):
    """A file whose bytes are in memory already, so that nobody needs to read them into a buffer."""

    def view(self, start: int, num_bytes: int) -> memoryview:
        """The bytes from ``start`` on, valid until `close`; all ``num_bytes`` are there."""


class FileOps(Protocol):
    """What the store needs from a file system. Every method may raise OSError.

    ForeignEntryError, a subclass, is raised for a symbolic link on the way to an entry, and when
    contents are asked for of an entry that is neither a file nor a directory.
    """

    def mkdir(self, path: Path, *, parents: bool = False) -> None:
        """Make a directory; an existing one is FileExistsError unless ``parents``."""

    def listdir(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""

    def scan(self, path: Path, *, beginning: tuple[str, ...] = ("",)) -> Mapping[str, Kind]:
        """Names in a directory that begin with one of these, sorted, and the kind of each."""

    def sizes(self, path: Path) -> Mapping[str, int]:
        """Names of the regular files in a directory, and the length of each in bytes."""

    def kind(self, path: Path) -> Kind | None:
        """The kind of the entry, a link not followed; None if there is none."""

    def exists(self, path: Path) -> bool:
        """Whether there is an entry with this name, a dangling link included."""

    def is_dir(self, path: Path) -> bool:
        """Whether the entry is a directory, a link not followed."""

    def file_size(self, path: Path) -> int:
        """Length of a regular file in bytes; ForeignEntryError for anything else."""

    def read_bytes(self, path: Path, *, max_bytes: int = SMALL_FILE_BYTES) -> bytes:
        """The whole file; StorageError (EFBIG), before anything is read, if it is larger."""

    def write_file(self, path: Path, data: bytes) -> None:
        """Create or overwrite a small file; not durable yet."""

    def sync_file(self, path: Path) -> None:
        """Make a file's contents and length durable."""

    def sync_dir(self, path: Path) -> None:
        """Make a directory's entries durable."""

    def rename(self, src: Path, dst: Path) -> None:
        """Move an entry atomically; FileExistsError if ``dst`` exists.

        A link itself is moved, not its target. OSError (EXDEV) where the file system cannot
        rename, such as a directory of a lower layer of overlayfs.
        """

    def replace(self, src: Path, dst: Path) -> None:
        """Move a file atomically, over the file or link that may be at ``dst``.

        The permissions and the group of a file that is replaced stay if it is this user's own; of
        anybody else's nothing does, and setuid and setgid never do.
        """

    def link(self, src: Path, dst: Path) -> None:
        """Give a regular file a second name; FileExistsError if ``dst`` exists.

        OSError (EMLINK, EPERM, EXDEV, ...) where the file system gives none.
        """

    def point_link(self, path: Path, target: str) -> None:
        """Make a symbolic link, or replace a link or file by it; readers see either."""

    def read_link(self, path: Path) -> str | None:
        """Where a symbolic link points, as it is written; None if there is no link."""

    def unlink(self, path: Path) -> None:
        """Remove a file, or a link but not its target; IsADirectoryError for a directory."""

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and its contents; a crash can leave part of it.

        Links in it are removed, but not their targets. NotADirectoryError for anything but a
        directory.
        """

    def replace_file(self, path: Path, data: bytes, *, sync: bool = True) -> None:
        """Replace a small file atomically: readers see the whole old or the whole new contents.

        Without ``sync`` a power cut may leave neither. A link is replaced, not its target.
        """

    def append_line(self, path: Path, line: str) -> None:
        """Append a line; if a crash tore the last one, end that first."""

    def free_bytes(self, path: Path) -> int:
        """Bytes that this process may still write to the file system of ``path``.

        ``UNKNOWN_BYTES`` where the file system reports no sizes.
        """

    def create_payload(self, path: Path, *, num_bytes: int) -> PayloadFile:
        """Create a file of about ``num_bytes``; FileExistsError if it exists."""

    def open_for_read(self, path: Path) -> ReadFile:
        """Open an existing file."""


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The system calls that devices may refuse, shorten or fail; tests substitute their own."""

    open: Callable[..., int] = os.open
    pwrite: Callable[[int, memoryview, int], int] = os.pwrite
    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate
    fdatasync: Callable[[int], None] = os.fdatasync
    fsync: Callable[[int], None] = os.fsync
    statvfs: Callable[[int], os.statvfs_result] = os.fstatvfs
    unlink: Callable[..., None] = os.unlink
    link: Callable[..., None] = os.link
    fchown: Callable[[int, int, int], None] = os.fchown


class LocalFileOps:
    """`FileOps` of the operating system, for the directory ``root`` and everything below it.

    ``direct=False`` never tries direct I/O. ``piece_bytes``: a buffered payload is synced whenever
    this many bytes are unsynced.
    """

    def __init__(
        self,
        root: Path,
        *,
        direct: bool = True,
        piece_bytes: int = 32 << 20,
        calls: SystemCalls = SystemCalls(),
    ) -> None:
        self._root = root.absolute()
        self._prefix = f"{str(self._root).rstrip('/')}/"
        self._direct = direct
        self._piece_bytes = piece_bytes
        self._calls = calls

    def mkdir(self, path: Path, *, parents: bool = False) -> None:
        if parents and self.is_dir(path):
            return
        if parents and not self.is_dir(path.parent):
            self.mkdir(path.parent, parents=True)
        try:
            with self._entry(path) as (folder, name):
                os.mkdir(name, dir_fd=folder)
        except FileExistsError:
            if not (parents and self.is_dir(path)):  # otherwise another process was faster
                raise

    def listdir(self, path: Path) -> list[str]:
        with self._folder(path, os.O_RDONLY) as folder, _naming(path):
            return sorted(os.listdir(folder))

    def scan(self, path: Path, *, beginning: tuple[str, ...] = ("",)) -> Mapping[str, Kind]:
        with (
            self._folder(path, os.O_RDONLY) as folder,
            _naming(path),
            os.scandir(folder) as found,
        ):
            wanted = (entry for entry in found if entry.name.startswith(beginning))
            return {entry.name: _kind_of(entry) for entry in sorted(wanted, key=_name_of)}

    def sizes(self, path: Path) -> Mapping[str, int]:
        sizes = {}
        with (
            self._folder(path, os.O_RDONLY) as folder,
            _naming(path),
            os.scandir(folder) as found,
        ):
            for entry in found:
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    if entry.is_file(follow_symlinks=False):
                        sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def kind(self, path: Path) -> Kind | None:
        try:
            return _kind(self._status(path).st_mode)
        except _NO_SUCH:
            return None

    def exists(self, path: Path) -> bool:
        return self.kind(path) is not None

    def is_dir(self, path: Path) -> bool:
        return self.kind(path) is Kind.DIRECTORY

    def file_size(self, path: Path) -> int:
        status = self._status(path)
        _require_regular(status, path)
        return status.st_size

    def identity(self, path: Path) -> tuple[int, int]:
        """Device and inode number: two paths have the same only if they are the same file."""
        status = self._status(path)
        return status.st_dev, status.st_ino

    def read_bytes(self, path: Path, *, max_bytes: int = SMALL_FILE_BYTES) -> bytes:
        with self._file(path, os.O_RDONLY) as fd:
            size = os.fstat(fd).st_size
            # Checked again after the read: the file may have grown, or report no size (procfs).
            data = b"" if size > max_bytes else _read_all(fd, size, max_bytes + 1)
        if (found := max(size, len(data))) > max_bytes:
            text = f"expected at most {max_bytes} bytes, found {found}"
            raise StorageError(errno.EFBIG, text, str(path))
        return data

    def write_file(self, path: Path, data: bytes) -> None:
        with self._file(path, os.O_WRONLY | os.O_CREAT) as fd:
            if os.fstat(fd).st_nlink == 1:
                os.ftruncate(fd, 0)
                write_all(fd, data)
                return
        self.replace_file(path, data, sync=False)

    def sync_file(self, path: Path) -> None:
        with self._file(path, os.O_RDONLY) as fd:
            self._calls.fsync(fd)

    def sync_dir(self, path: Path) -> None:
        with self._folder(path, os.O_RDONLY) as folder, _naming(path):
            try:
                self._calls.fsync(folder)
            except OSError as error:
                # EINVAL: this file system has no sync of directories, so there is nothing to do.
                if error.errno != errno.EINVAL:
                    raise

    def rename(self, src: Path, dst: Path) -> None:
        with self._entry(src) as (from_folder, name), self._entry(dst) as (to_folder, new_name):
            # rename(2) would replace an empty directory. Checking first is no race: only the
            # process that holds the directory's lock renames anything in it.
            if self.exists(dst):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(dst))
            os.rename(name, new_name, src_dir_fd=from_folder, dst_dir_fd=to_folder)

    def replace(self, src: Path, dst: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._adopt(src, self._status(dst))
        with self._entry(src) as (from_folder, name), self._entry(dst) as (to_folder, new_name):
            os.replace(name, new_name, src_dir_fd=from_folder, dst_dir_fd=to_folder)

    def link(self, src: Path, dst: Path) -> None:
        _require_regular(self._status(src), src)
        with self._entry(src) as (from_folder, name), self._entry(dst) as (to_folder, new_name):
            self._calls.link(
                name,
                new_name,
                src_dir_fd=from_folder,
                dst_dir_fd=to_folder,
                follow_symlinks=False,
            )

    def _adopt(self, path: Path, status: os.stat_result) -> None:
        """Give a file the group and the permissions of another of this user's, durably.

        Whoever may write to the directory can plant a file with any mode, but not as ours.
        """
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return
        mode = status.st_mode & 0o777
        with self._file(path, os.O_RDONLY) as fd:
            try:
                self._calls.fchown(fd, -1, status.st_gid)
            except PermissionError:  # this user has left the group: its bits are not for the next
                mode &= ~0o070
            os.fchmod(fd, mode)
            self._calls.fsync(fd)

    def point_link(self, path: Path, target: str) -> None:
        temporary = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            self.unlink(temporary)  # left by a crash
        with self._entry(path) as (folder, name):
            os.symlink(target, temporary.name, dir_fd=folder)
            try:
                os.replace(temporary.name, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.unlink(temporary.name, dir_fd=folder)
                raise

    def read_link(self, path: Path) -> str | None:
        if self.kind(path) is not Kind.LINK:
            return None
        with self._entry(path) as (folder, name):
            return os.readlink(name, dir_fd=folder)

    def unlink(self, path: Path) -> None:
        with self._entry(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def remove_tree(self, path: Path) -> None:
        with self._entry(path) as (folder, name):
            _remove_tree(folder, name, levels=_MOST_LEVELS, unlink=self._calls.unlink)

    def replace_file(self, path: Path, data: bytes, *, sync: bool = True) -> None:
        temporary = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            self.unlink(temporary)  # left by a crash, or put there by someone
        try:
            with self._file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                write_all(fd, data)
            if sync:  # otherwise a power cut may leave the new name with an empty file
                self.sync_file(temporary)
            with self._entry(path) as (folder, name):
                os.replace(temporary.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise

    def append_line(self, path: Path, line: str) -> None:
        with self._file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as fd:
            size = os.fstat(fd).st_size
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            data = f"{chr(10) if torn else ''}{line}\n".encode()
            if os.fstat(fd).st_nlink == 1:
                write_all(fd, data)
                return
            before = _read_all(fd, size, size + _READ_BYTES)
        self.replace_file(path, before + data)

    def free_bytes(self, path: Path) -> int:
        with self._folder(path, os.O_RDONLY) as folder, _naming(path):
            status = self._calls.statvfs(folder)
        if status.f_blocks == 0:  # some network and FUSE file systems: unknown, not full
            return UNKNOWN_BYTES
        return status.f_bavail * status.f_frsize

    def create_payload(self, path: Path, *, num_bytes: int) -> PayloadFile:
        fd, direct = self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        if direct and num_bytes:
            self._preallocate(fd, num_bytes)
        return _LocalPayload(fd, direct, self._calls, self._piece_bytes)

    def open_for_read(self, path: Path) -> ReadFile:
        fd, direct = self._open(path, os.O_RDONLY)
        return _LocalRead(fd, direct, self._calls)

    def open_to_lock(self, path: Path) -> int:
        """A descriptor of a small file to read, write and lock; created if it is missing.

        Only its owner may open it, if that is this user: others could hold the lock for ever.
        """
        fd = self._open_regular(path, os.O_RDWR | os.O_CREAT, 0o600)
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:
            os.fchmod(fd, 0o600)
        return fd

    def bind_socket(self, path: Path, sock: socket.socket) -> None:
        """Make ``path`` a UNIX socket that only this user may connect to, in place of an old one.

        Through a descriptor, since an address has 108 bytes. Raises OSError for any other entry.
        """
        if self.kind(path) is Kind.OTHER:
            self.unlink(path)
        os.fchmod(sock.fileno(), 0o600)  # before it is bound: nobody can be faster
        with self._entry(path) as (folder, name):
            sock.bind(f"/proc/self/fd/{folder}/{name}")

    def connect_socket(self, path: Path, sock: socket.socket) -> None:
        """Connect to the UNIX socket at ``path``; ConnectionRefusedError if nobody listens."""
        with self._entry(path) as (folder, name):
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                sock.connect(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)

    # From paths to descriptors. Nothing else opens anything below the root.

    def _below(self, path: Path) -> tuple[Path, list[str]]:
        """The directory to start from, and the names from it to ``path``, to open one by one.

        For a path below the root that is the root. Any other path is the user's own: it is
        returned as it is, without names.
        """
        text = str(path.absolute())
        names = text[len(self._prefix) :].split("/") if text.startswith(self._prefix) else []
        if not any(names):
            return path, []
        if ".." in names:
            raise StorageError(errno.EINVAL, "leaves the checkpoint directory", text)
        return self._root, names

    @contextlib.contextmanager
    def _folder(self, path: Path, access: int = os.O_PATH) -> Iterator[int]:
        """A descriptor of a directory."""
        base, names = self._below(path)
        fd = _open_folder(base, os.O_PATH if names else access)
        try:
            for number, name in enumerate(names, start=1):
                # O_PATH on the way: search permission is enough for a directory passed through.
                way = access if number == len(names) else os.O_PATH
                inner = _open_inner(fd, name, way, base, names[:number])
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _entry(self, path: Path) -> Iterator[tuple[int, str]]:
        """A descriptor of the directory that contains an entry, and the entry's name."""
        with self._folder(path.parent) as folder, _naming(path):
            yield folder, path.name

    def _status(self, path: Path) -> os.stat_result:
        if self._below(path)[1]:
            with self._entry(path) as (folder, name):
                return os.stat(name, dir_fd=folder, follow_symlinks=False)
        with _naming(path):
            return os.stat(path)

    @contextlib.contextmanager
    def _file(self, path: Path, flags: int) -> Iterator[int]:
        """A descriptor of a regular file."""
        fd = self._open_regular(path, flags)
        try:
            with _naming(path):
                yield fd
        finally:
            os.close(fd)

    def _open_regular(self, path: Path, flags: int, mode: int = 0o666) -> int:
        # O_NONBLOCK, since opening a FIFO would otherwise block until its other end is opened.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self._entry(path) as (folder, name):
            try:
                fd = self._calls.open(name, flags, mode, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                    raise _foreign(path, folder, name) from None
                raise
            try:
                _require_regular(os.fstat(fd), path)
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
            except BaseException:
                os.close(fd)
                raise
        return fd

    def _open(self, path: Path, flags: int) -> tuple[int, bool]:
        if self._direct:
            try:
                return self._open_regular(path, flags | os.O_DIRECT), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            # Linux creates the file before it refuses O_DIRECT, so it exists by now.
            flags &= ~os.O_EXCL
        return self._open_regular(path, flags), False

    def _preallocate(self, fd: int, num_bytes: int) -> None:
        """Reserve the blocks, so that a full disk fails before gigabytes are written."""
        try:
            self._calls.fallocate(fd, 0, round_up_to_page(num_bytes))
        except OSError as error:
            if error.errno not in _NO_PREALLOCATION:
                os.close(fd)
                raise


class _Descriptor:
    """An open file that may use direct I/O, and falls back to buffered I/O if that is refused."""

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
        """Fall back to buffered I/O if ``error`` came from direct I/O; returns whether to retry."""
        if error.errno != errno.EINVAL or not was_direct:
            return False
        # Another thread may have changed the flag already; retrying is right in that case too.
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
        """Sync every ``piece_bytes``: one large sync at the end would stall the machine."""
        with self._lock:
            self._unsynced_bytes += count
            full = self._unsynced_bytes >= self._piece_bytes
            if full:
                self._unsynced_bytes = 0
        if full:  # outside the lock: other threads go on writing
            self.datasync()

    def truncate(self, num_bytes: int) -> None:
        os.ftruncate(self._fd, num_bytes)

    def datasync(self) -> None:
        self._calls.fdatasync(self._fd)
        if not self._direct:  # leave the page cache to the data loader
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


class _LocalRead(_Descriptor):
    def __init__(self, fd: int, direct: bool, calls: SystemCalls) -> None:
        super().__init__(fd, direct, calls)
        self._size = os.fstat(fd).st_size

    @property
    def size(self) -> int:
        return self._size

    def preadinto(self, view: memoryview, offset: int) -> int:
        # Stop at the known size: a read that continues after the last byte has an unaligned
        # offset, which direct I/O refuses.
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
            return -1  # nothing was read; the caller retries


def read_only(fd: int) -> int:
    """A descriptor of the same file, or memory, that cannot write; the caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def _open_folder(path: Path, access: int) -> int:
    with _naming(path):
        return os.open(path, _FOLDER | access)


def _open_inner(folder: int, name: str, access: int, base: Path, names: Sequence[str]) -> int:
    """A descriptor of directory ``name`` in ``folder``; ``names`` lead from ``base`` to it."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW | access, dir_fd=folder)
    except NotADirectoryError as error:
        path = base.joinpath(*names)
        kind = _kind(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        if kind is Kind.FILE:
            raise _named(error, path) from None
        raise ForeignEntryError.at(path, kind.value) from None
    except OSError as error:
        raise _named(error, base.joinpath(*names)) from None


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Give OSErrors of the block the whole path: the calls see only a name and a descriptor."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _named(error, path) from None


def _named(error: OSError, path: Path) -> OSError:
    if error.errno is None or error.filename == str(path):
        return error
    return OSError(error.errno, error.strerror, str(path))


def _foreign(path: Path, folder: int, name: str) -> ForeignEntryError:
    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return ForeignEntryError.at(path, _kind(status.st_mode).value)


def _require_regular(status: os.stat_result, path: Path) -> None:
    kind = _kind(status.st_mode)
    if kind is not Kind.FILE:
        raise ForeignEntryError.at(path, kind.value)


def _kind(mode: int) -> Kind:
    kinds = {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.DIRECTORY, stat.S_IFLNK: Kind.LINK}
    return kinds.get(stat.S_IFMT(mode), Kind.OTHER)


def _kind_of(entry: os.DirEntry[str]) -> Kind:
    """Like `_kind`, from the listing itself, without a system call per entry."""
    if entry.is_symlink():
        return Kind.LINK
    if entry.is_dir(follow_symlinks=False):
        return Kind.DIRECTORY
    return Kind.FILE if entry.is_file(follow_symlinks=False) else Kind.OTHER


def _name_of(entry: os.DirEntry[str]) -> str:
    return entry.name


def _read_all(fd: int, size: int, most: int) -> bytes:
    """The contents of a file of about ``size`` bytes; stops after ``most`` bytes."""
    pieces, num_bytes, wanted = [], 0, size + 1
    while piece := os.read(fd, min(wanted, most - num_bytes)):
        pieces.append(piece)
        num_bytes += len(piece)
        wanted = _READ_BYTES
    return b"".join(pieces)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, in as many calls as it takes."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


def _remove_tree(folder: int, name: str, *, levels: int, unlink: Callable[..., None]) -> None:
    """Whoever copies the files may add markers meanwhile, or take them away."""
    if levels == 0:
        raise StorageError(errno.ENAMETOOLONG, f"more than {_MOST_LEVELS} directories deep", name)
    fd = os.open(name, os.O_RDONLY | _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    try:
        for _ in range(_MOST_SWEEPS - 1):
            _remove_entries(fd, levels=levels, unlink=unlink)
            with contextlib.suppress(OSError):  # if not for want of emptiness, the last one says so
                os.rmdir(name, dir_fd=folder)
                return
        _remove_entries(fd, levels=levels, unlink=unlink)
        os.rmdir(name, dir_fd=folder)
    finally:
        os.close(fd)


def _remove_entries(fd: int, *, levels: int, unlink: Callable[..., None]) -> None:
    with os.scandir(fd) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for inner, is_dir in entries:
        with contextlib.suppress(FileNotFoundError):
            if is_dir:
                _remove_tree(fd, inner, levels=levels - 1, unlink=unlink)
            else:
                unlink(inner, dir_fd=fd)
