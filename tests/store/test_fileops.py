"""The contract for both implementations, and behaviour that only the real one has."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from checkfreq.errors import ConfigError, ForeignEntryError, StorageError
from checkfreq.store.fileops import (
    UNKNOWN_BYTES,
    FileOps,
    Kind,
    LocalFileOps,
    SystemCalls,
    read_only,
    user_file,
    user_path,
)
from checkfreq.testing import CrashingFileOps, FileOpsContract, page_aligned
from checkfreq.types import PAGE_BYTES


class TestLocalFileOps(FileOpsContract):
    @pytest.fixture
    def ops(self, tmp_path: Path) -> FileOps:
        return LocalFileOps(tmp_path)

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tmp_path


class TestBufferedLocalFileOps(TestLocalFileOps):
    @pytest.fixture
    def ops(self, tmp_path: Path) -> FileOps:
        return LocalFileOps(tmp_path, direct=False)


class TestCrashingFileOps(FileOpsContract):
    @pytest.fixture
    def ops(self) -> FileOps:
        return CrashingFileOps()

    def plant_link(self, ops: FileOps, path: Path, target: Path) -> None:
        assert isinstance(ops, CrashingFileOps)
        ops.plant_link(path)

    @pytest.fixture
    def root(self, ops: FileOps) -> Path:
        ops.mkdir(Path("/chk"))
        return Path("/chk")


def refuse(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def open_refusing_direct(name: str, flags: int, mode: int, *, dir_fd: int) -> int:
    if flags & os.O_DIRECT:
        fd = os.open(name, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)
        os.close(fd)  # as Linux: made, then refused
        raise refuse(errno.EINVAL)
    return os.open(name, flags, mode, dir_fd=dir_fd)


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def pwrite_refusing_direct(fd: int, view: memoryview, offset: int) -> int:
    if is_direct(fd):
        raise refuse(errno.EINVAL)
    return os.pwrite(fd, view, offset)


def test_payload_is_buffered_where_opening_it_direct_is_refused(tmp_path: Path) -> None:
    ops = LocalFileOps(tmp_path, calls=SystemCalls(open=open_refusing_direct))
    file = ops.create_payload(tmp_path / "payload", num_bytes=3)
    assert not file.direct
    file.pwrite(memoryview(b"abc"), 0)
    file.datasync()
    file.close()
    assert ops.read_bytes(tmp_path / "payload") == b"abc"
    reader = ops.open_for_read(tmp_path / "payload")
    assert not reader.direct
    reader.close()


def test_a_write_refused_while_another_thread_falls_back_is_retried(tmp_path: Path) -> None:
    path = tmp_path / "payload"

    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        if offset == 0 and file.direct:
            file.pwrite(memoryview(page_aligned(b"other")), PAGE_BYTES)  # the other thread
        return pwrite_refusing_direct(fd, view, offset)

    calls = SystemCalls(pwrite=pwrite)
    file = LocalFileOps(tmp_path, calls=calls).create_payload(path, num_bytes=2 * PAGE_BYTES)
    file.pwrite(memoryview(page_aligned(b"one")), 0)
    file.close()
    data = path.read_bytes()
    assert data[:3] + data[PAGE_BYTES : PAGE_BYTES + 5] == b"oneother"


def test_short_writes_are_continued(tmp_path: Path) -> None:
    def pwrite(fd: int, view: memoryview, offset: int) -> int:
        return os.pwrite(fd, view[:PAGE_BYTES], offset)

    data = os.urandom(3 * PAGE_BYTES)
    ops = LocalFileOps(tmp_path, calls=SystemCalls(pwrite=pwrite))
    file = ops.create_payload(tmp_path / "payload", num_bytes=len(data))
    file.pwrite(memoryview(page_aligned(data)), 0)
    file.close()
    assert ops.read_bytes(tmp_path / "payload") == data


@pytest.mark.parametrize(
    ("call", "act"),
    [
        ("open", lambda ops, path: ops.open_for_read(path)),
        ("fallocate", lambda ops, path: ops.create_payload(path / "new", num_bytes=1)),
        ("pwrite", lambda ops, path: write_page(ops, path / "new")),
        ("preadv", lambda ops, path: read_page(ops, path / "file")),
        ("fsync", lambda ops, path: ops.sync_dir(path)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_that_is_no_refusal_of_direct_access_is_raised_at_once(
    call: str, act: Callable[[LocalFileOps, Path], object], tmp_path: Path
) -> None:
    calls: list[object] = []

    def fail(*args: object, **kwargs: object) -> NoReturn:
        calls.append(args)
        raise refuse(errno.EIO)

    (tmp_path / "file").write_bytes(b"abc")
    with pytest.raises(OSError, match="Input/output error"):
        act(LocalFileOps(tmp_path, calls=SystemCalls(**{call: fail})), tmp_path)
    assert len(calls) == 1


def write_page(ops: LocalFileOps, path: Path) -> None:
    with closing(ops.create_payload(path, num_bytes=PAGE_BYTES)) as file:
        file.pwrite(memoryview(page_aligned(b"abc")), 0)


def read_page(ops: LocalFileOps, path: Path) -> None:
    with closing(ops.open_for_read(path)) as file:
        file.preadinto(memoryview(page_aligned(b"")), 0)


def test_buffered_payload_is_synced_in_bounded_pieces(tmp_path: Path) -> None:
    synced_at: list[int] = []

    def fdatasync(fd: int) -> None:
        synced_at.append(os.fstat(fd).st_size)
        os.fdatasync(fd)

    calls = SystemCalls(fdatasync=fdatasync)
    ops = LocalFileOps(tmp_path, direct=False, piece_bytes=2 * PAGE_BYTES, calls=calls)
    file = ops.create_payload(tmp_path / "payload", num_bytes=0)
    for number in range(5):
        file.pwrite(memoryview(bytes(PAGE_BYTES)), number * PAGE_BYTES)
    file.close()
    assert synced_at == [2 * PAGE_BYTES, 4 * PAGE_BYTES]


def test_a_file_system_without_preallocation_is_supported(tmp_path: Path) -> None:
    def fallocate(fd: int, offset: int, num_bytes: int) -> None:
        raise refuse(errno.EOPNOTSUPP)

    def disguised(name: str, flags: int, mode: int, *, dir_fd: int) -> int:
        return os.open(name, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd)  # refuses nothing

    calls = SystemCalls(open=disguised, fallocate=fallocate)
    file = LocalFileOps(tmp_path, calls=calls).create_payload(tmp_path / "payload", num_bytes=1)
    file.pwrite(memoryview(b"x"), 0)
    file.close()
    assert (tmp_path / "payload").read_bytes() == b"x"


def test_reads_fall_back_to_buffered_where_direct_ones_are_refused(tmp_path: Path) -> None:
    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if is_direct(fd):
            raise refuse(errno.EINVAL)
        return os.preadv(fd, views, offset)

    (tmp_path / "file").write_bytes(b"abc")
    file = LocalFileOps(tmp_path, calls=SystemCalls(preadv=preadv)).open_for_read(tmp_path / "file")
    target = page_aligned(bytes(PAGE_BYTES))
    assert file.preadinto(memoryview(target), 0) == 3
    assert target[:3] == b"abc"
    assert not file.direct
    file.close()


def test_a_file_system_that_cannot_sync_directories_is_supported() -> None:
    LocalFileOps(Path("/proc")).sync_dir(Path("/proc"))  # procfs answers EINVAL


@pytest.mark.parametrize("plant", [os.mkfifo, plant_socket], ids=["fifo", "socket"])
def test_anything_but_a_regular_file_is_refused_without_blocking(
    plant: Callable[[Path], None], tmp_path: Path
) -> None:
    ops, path = LocalFileOps(tmp_path), tmp_path / "entry"
    plant(path)
    assert ops.scan(tmp_path) == {"entry": Kind.OTHER}
    for refused in (
        lambda: ops.read_bytes(path),
        lambda: ops.open_for_read(path),
        lambda: ops.write_file(path, b""),
        lambda: ops.append_line(path, ""),
        lambda: ops.open_to_lock(path),
        lambda: ops.file_size(path),
        lambda: ops.listdir(path / "inside"),
    ):
        with pytest.raises(ForeignEntryError, match="a FIFO, socket or device"):
            refused()
    ops.replace_file(path, b"ours")
    assert path.read_bytes() == b"ours"


def test_the_bound_holds_for_a_file_that_grows_while_it_is_read() -> None:
    with pytest.raises(StorageError, match="expected at most 10 bytes"):
        LocalFileOps(Path("/proc")).read_bytes(Path("/proc/cpuinfo"), max_bytes=10)  # of size 0


def test_no_path_leaves_the_directory(tmp_path: Path) -> None:
    (tmp_path / "chk").mkdir()
    (tmp_path / "secret").write_bytes(b"x")
    with pytest.raises(StorageError, match="leaves the checkpoint directory"):
        LocalFileOps(tmp_path / "chk").read_bytes(tmp_path / "chk" / ".." / "secret")


@pytest.mark.parametrize("mode", [None, 0o666])
def test_a_file_to_lock_is_its_owners_alone(mode: int | None, tmp_path: Path) -> None:
    if mode is not None:  # as a copy of the directory has it
        (tmp_path / "lock").touch()
        (tmp_path / "lock").chmod(mode)
    os.close(LocalFileOps(tmp_path).open_to_lock(tmp_path / "lock"))
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("change", "after"),
    [
        (lambda ops, path: ops.append_line(path, "two"), b"one\ntwo\n"),
        (lambda ops, path: ops.write_file(path, b"new"), b"new"),
        (lambda ops, path: ops.replace_file(path, b"new"), b"new"),
    ],
)
def test_what_is_changed_under_one_name_stays_under_the_others(
    change: Callable[[LocalFileOps, Path], None], after: bytes, tmp_path: Path
) -> None:
    (tmp_path / "log").write_bytes(b"one\n")
    os.link(tmp_path / "log", tmp_path / "backup")
    ops = LocalFileOps(tmp_path)
    for _ in range(2):
        change(ops, tmp_path / "log")
    assert (tmp_path / "log").read_bytes().startswith(after)
    assert (tmp_path / "backup").read_bytes() == b"one\n"
    assert sorted(os.listdir(tmp_path)) == ["backup", "log"]


def test_a_file_system_that_reports_no_sizes_does_not_count_as_full(tmp_path: Path) -> None:
    nothing = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    calls = SystemCalls(statvfs=lambda fd: nothing)
    assert LocalFileOps(tmp_path, calls=calls).free_bytes(tmp_path) == UNKNOWN_BYTES
    full = os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255))
    calls = SystemCalls(statvfs=lambda fd: full)
    assert LocalFileOps(tmp_path, calls=calls).free_bytes(tmp_path) == 0


def test_a_tree_that_is_too_deep_is_not_removed(tmp_path: Path) -> None:
    deep = tmp_path.joinpath("tree", *["d"] * 100)
    deep.mkdir(parents=True)
    with pytest.raises(StorageError, match="directories deep"):
        LocalFileOps(tmp_path).remove_tree(tmp_path / "tree")
    assert deep.is_dir()


@pytest.mark.parametrize("times", [2, 99])
def test_a_tree_that_others_change_is_removed_once_they_stop(times: int, tmp_path: Path) -> None:
    tree, late = tmp_path / "tree", iter(range(times))
    for name in ("a", "b"):
        (tree / name).mkdir(parents=True)
        (tree / name / "file").touch()

    def unlink(name: str, *, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)
        if (number := next(late, None)) is not None:
            (tree / f"marker-{number}").touch()
        (tree / "b" / "file").unlink(missing_ok=True)

    stops = times < 99
    with contextlib.nullcontext() if stops else pytest.raises(OSError, match="not empty"):
        LocalFileOps(tmp_path, calls=SystemCalls(unlink=unlink)).remove_tree(tree)
    assert tree.exists() is not stops


def test_a_replacement_that_fails_leaves_nothing_beside_the_old_file(tmp_path: Path) -> None:
    def fsync(fd: int) -> None:
        raise refuse(errno.EIO)

    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match="Input/output error"):
        LocalFileOps(tmp_path, calls=SystemCalls(fsync=fsync)).replace_file(
            tmp_path / "file", b"new"
        )
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_folder_that_another_process_makes_meanwhile_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops, made = LocalFileOps(tmp_path), tmp_path / "made"
    seen = LocalFileOps.is_dir

    def is_dir(self: LocalFileOps, path: Path) -> bool:
        found = seen(self, path)
        if path == made and not found:
            made.mkdir()
        return found

    monkeypatch.setattr(LocalFileOps, "is_dir", is_dir)
    ops.mkdir(made, parents=True)
    assert made.is_dir()


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    ops = LocalFileOps(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ops.mkdir(tmp_path / "a" / "b", parents=True)
        ops.write_file(tmp_path / "a" / "b" / "file", b"x")
        ops.open_for_read(tmp_path / "a" / "b" / "file").close()
        ops.remove_tree(tmp_path / "a")
        for path in (tmp_path / "fifo", tmp_path / "link", tmp_path / "link" / "x", tmp_path):
            with pytest.raises(OSError, match="found|directory"):
                ops.open_for_read(path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="making a file another user's needs root")
def test_a_file_of_another_user_hands_on_nothing(tmp_path: Path) -> None:
    ops = LocalFileOps(tmp_path)
    ops.write_file(tmp_path / "src", b"new")
    before = (tmp_path / "src").stat()
    (tmp_path / "file").write_bytes(b"planted")
    os.chown(tmp_path / "file", 65534, 65534)
    (tmp_path / "file").chmod(0o6777)
    ops.replace(tmp_path / "src", tmp_path / "file")
    after = (tmp_path / "file").stat()
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)
    assert after.st_mode == before.st_mode


def test_setuid_is_never_handed_on(tmp_path: Path) -> None:
    ops = LocalFileOps(tmp_path)
    ops.write_file(tmp_path / "file", b"old")
    (tmp_path / "file").chmod(0o6750)
    ops.write_file(tmp_path / "src", b"new")
    old, new = ops.identity(tmp_path / "file"), ops.identity(tmp_path / "src")
    ops.replace(tmp_path / "src", tmp_path / "file")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o750
    assert ops.identity(tmp_path / "file") == new != old


@pytest.mark.parametrize("is_member", [True, False])
def test_a_group_keeps_its_permissions_only_with_its_file(is_member: bool, tmp_path: Path) -> None:
    given: list[tuple[int, int]] = []

    def fchown(fd: int, user: int, group: int) -> None:
        given.append((user, group))
        if not is_member:
            raise PermissionError(errno.EPERM, "not a member")

    ops = LocalFileOps(tmp_path, calls=SystemCalls(fchown=fchown))
    ops.write_file(tmp_path / "file", b"old")
    (tmp_path / "file").chmod(0o664)
    ops.write_file(tmp_path / "src", b"new")
    ops.replace(tmp_path / "src", tmp_path / "file")
    assert given == [(-1, (tmp_path / "file").stat().st_gid)]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == (0o664 if is_member else 0o604)


def test_a_socket_is_this_users_alone_and_replaces_an_old_one(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)  # an address of a socket has 108 bytes
    folder.mkdir()
    ops, path = LocalFileOps(folder), folder / "socket"
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
            ops.bind_socket(path, listener)
            listener.listen()
            assert path.stat().st_mode & 0o777 == 0o600
            ops.connect_socket(path, client)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        ops.connect_socket(path, client)


def test_a_file_is_not_replaced_by_a_socket_and_no_link_to_one_is_followed(tmp_path: Path) -> None:
    ops = LocalFileOps(tmp_path)
    ops.write_file(tmp_path / "file", b"kept")
    (tmp_path / "link").symlink_to("real")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(OSError, match="in use"):
            ops.bind_socket(tmp_path / "file", listener)
        ops.bind_socket(tmp_path / "real", listener)
        listener.listen()
        with pytest.raises(OSError, match="link"):
            ops.connect_socket(tmp_path / "link", client)
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_a_read_only_descriptor_reads_the_same_memory_and_cannot_write_to_it() -> None:
    memory = os.memfd_create("checkfreq-test", os.MFD_CLOEXEC)
    os.write(memory, b"state")
    reader = read_only(memory)
    try:
        assert os.pread(reader, 5, 0) == b"state"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(reader, b"x")
    finally:
        os.close(reader)
        os.close(memory)


def test_a_users_path_is_absolute_and_starts_at_home_where_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("chk") == tmp_path / "chk"
    assert user_path(b"~/chk") == Path("/home/me/chk")
    assert user_path(Path("a~b")) == tmp_path / "a~b"
    with pytest.raises(ConfigError, match="expected a path"):
        user_path("")


def test_a_users_file_is_where_links_lead_and_no_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("file")
    assert user_file(tmp_path / "link") == tmp_path / "file"
    with pytest.raises(ConfigError, match="expected a regular file"):
        user_file(tmp_path / "fifo")
