"""What the store relies on in every `FileOps`, as a class of tests to derive from."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkfreq.errors import ForeignEntryError, StorageError
from checkfreq.store.fileops import FileOps, Kind
from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry, digest_of
from checkfreq.store.store import CheckpointStore, CommitResult
from checkfreq.types import PAGE_BYTES, Json


def commit_bytes(
    store: CheckpointStore,
    step: int,
    files: Mapping[str, bytes],
    *,
    attempt: str = "test",
    objects: Mapping[str, Json] | None = None,
    supersede_after: int | None = None,
) -> CommitResult:
    """Commit ``step`` by the regular path, with one uint8 tensor named "data" per file.

    Aborts the pending checkpoint if that fails.
    """
    pending = store.begin(step, attempt=attempt)
    try:
        entries = []
        for name, data in files.items():
            image, entry = _safetensors_image(name, data)
            payload = pending.create_payload(name, len(image))
            payload.pwrite(memoryview(page_aligned(image)), 0)
            pending.finish_payload(payload, len(image))
            entries.append(entry)
        manifest = Manifest(step, attempt, 1, 0.0, {}, tuple(entries), dict(objects or {}))
        return store.commit(pending, manifest, supersede_after=supersede_after)
    except Exception:
        store.abort(pending)
        raise


def _safetensors_image(name: str, data: bytes) -> tuple[bytes, FileEntry]:
    tensor = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    text = json.dumps({"data": tensor}).encode()
    header = len(text).to_bytes(8, "little") + text
    entry = TensorEntry("data", "uint8", (len(data),), len(header), len(data), digest_of(data))
    num_bytes = len(header) + len(data)
    return header + data, FileEntry(name, num_bytes, len(header), digest_of(header), (entry,))


class FileOpsContract:
    """What the store relies on. Subclasses provide the fixtures ``ops`` and ``root``."""

    def plant_link(self, ops: FileOps, path: Path, target: Path) -> None:
        """Put a symbolic link to ``target`` at ``path``, as an attacker or a user may."""
        os.symlink(target, path)

    def test_mkdir_makes_a_listed_directory(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "b")
        ops.write_file(root / "a", b"")
        assert ops.listdir(root) == ["a", "b"]
        assert ops.is_dir(root / "b")
        assert not ops.is_dir(root / "a")
        assert not ops.is_dir(root / "c")

    def test_mkdir_refuses_an_existing_name_unless_parents(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "a")
        with _raises(FileExistsError):
            ops.mkdir(root / "a")
        ops.mkdir(root / "a", parents=True)

    def test_mkdir_makes_missing_parents_only_when_asked(self, ops: FileOps, root: Path) -> None:
        with _raises(FileNotFoundError):
            ops.mkdir(root / "a" / "b")
        ops.mkdir(root / "a" / "b", parents=True)
        assert ops.is_dir(root / "a" / "b")

    def test_listdir_wants_a_directory(self, ops: FileOps, root: Path) -> None:
        ops.write_file(root / "file", b"")
        with _raises(NotADirectoryError):
            ops.listdir(root / "file")
        with _raises(FileNotFoundError):
            ops.listdir(root / "missing")

    def test_write_file_replaces_the_contents(self, ops: FileOps, root: Path) -> None:
        ops.write_file(root / "file", b"a longer text")
        ops.write_file(root / "file", b"short")
        assert ops.read_bytes(root / "file") == b"short"
        assert ops.file_size(root / "file") == 5
        assert ops.exists(root / "file")

    def test_files_are_not_directories_and_the_other_way(self, ops: FileOps, root: Path) -> None:
        for read in (ops.read_bytes, ops.file_size, ops.open_for_read):
            with _raises(FileNotFoundError):
                read(root / "missing")
        for read in (ops.read_bytes, ops.file_size, ops.open_for_read):
            with _raises(ForeignEntryError):
                read(root)
        with _raises(ForeignEntryError):
            ops.write_file(root, b"")
        with _raises(ForeignEntryError):
            ops.append_line(root, "")
        with _raises(FileNotFoundError):
            ops.write_file(root / "missing" / "file", b"")

    def test_syncs_want_what_they_sync(self, ops: FileOps, root: Path) -> None:
        ops.write_file(root / "file", b"x")
        ops.sync_file(root / "file")
        ops.sync_dir(root)
        for sync in (ops.sync_file, ops.sync_dir):
            with _raises(FileNotFoundError):
                sync(root / "missing")
        with _raises(NotADirectoryError):
            ops.sync_dir(root / "file")

    def test_rename_moves_a_directory_whole(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "a" / "sub", parents=True)
        ops.write_file(root / "a" / "file", b"x")
        ops.mkdir(root / "folder")
        ops.rename(root / "a", root / "folder" / "b")
        assert ops.listdir(root) == ["folder"]
        assert ops.listdir(root / "folder" / "b") == ["file", "sub"]

    def test_rename_never_overwrites(self, ops: FileOps, root: Path) -> None:
        for name in ("a", "empty"):
            ops.mkdir(root / name)
        ops.write_file(root / "file", b"x")
        for target in ("empty", "file"):
            with _raises(FileExistsError):
                ops.rename(root / "a", root / target)
        with _raises(FileNotFoundError):
            ops.rename(root / "missing", root / "b")
        assert ops.listdir(root) == ["a", "empty", "file"]

    def test_unlink_removes_a_file(self, ops: FileOps, root: Path) -> None:
        ops.write_file(root / "file", b"x")
        ops.unlink(root / "file")
        assert not ops.exists(root / "file")
        with _raises(FileNotFoundError):
            ops.unlink(root / "file")

    def test_remove_tree_removes_everything_below(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "a" / "sub", parents=True)
        for path in (root / "a" / "file", root / "a" / "sub" / "file"):
            ops.write_file(path, b"x")
        ops.remove_tree(root / "a")
        assert ops.listdir(root) == []
        with _raises(FileNotFoundError):
            ops.remove_tree(root / "a")

    def test_replace_file_leaves_only_the_new_contents(self, ops: FileOps, root: Path) -> None:
        for data in (b"first", b"second"):
            ops.replace_file(root / "file", data)
            assert ops.read_bytes(root / "file") == data
        assert ops.listdir(root) == ["file"]

    def test_replace_file_without_a_sync_is_as_whole(self, ops: FileOps, root: Path) -> None:
        ops.replace_file(root / "file", b"first")
        ops.replace_file(root / "file", b"second", sync=False)
        assert ops.read_bytes(root / "file") == b"second"

    def test_replace_moves_a_file_over_a_file_a_link_or_nothing(
        self, ops: FileOps, root: Path
    ) -> None:
        ops.write_file(root / "kept", b"kept")
        ops.write_file(root / "file", b"old")
        self.plant_link(ops, root / "link", root / "kept")
        for name in ("file", "link", "new"):
            ops.write_file(root / "src", b"new")
            ops.replace(root / "src", root / name)
            assert ops.read_bytes(root / name) == b"new"
        assert ops.listdir(root) == ["file", "kept", "link", "new"]
        assert ops.read_bytes(root / "kept") == b"kept"

    def test_replace_refuses_a_directory_and_a_missing_file(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "folder")
        ops.write_file(root / "file", b"kept")
        with _raises(IsADirectoryError):
            ops.replace(root / "file", root / "folder")
        with _raises(FileNotFoundError):
            ops.replace(root / "missing", root / "file")
        assert ops.read_bytes(root / "file") == b"kept"

    def test_a_file_with_two_names_outlives_either(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "a")
        ops.write_file(root / "a" / "file", b"text")
        ops.mkdir(root / "b")
        ops.link(root / "a" / "file", root / "b" / "other")
        ops.remove_tree(root / "a")
        assert ops.read_bytes(root / "b" / "other") == b"text"
        assert ops.kind(root / "b" / "other") is Kind.FILE

    def test_only_a_file_gets_a_second_name_and_only_a_new_one(
        self, ops: FileOps, root: Path
    ) -> None:
        ops.write_file(root / "file", b"text")
        ops.write_file(root / "other", b"other")
        ops.mkdir(root / "a")
        self.plant_link(ops, root / "symbolic", root / "file")
        with _raises(FileExistsError):
            ops.link(root / "file", root / "other")
        with _raises(FileNotFoundError):
            ops.link(root / "missing", root / "b")
        with _raises(ForeignEntryError):
            ops.link(root / "a", root / "b")
        with _raises(ForeignEntryError):
            ops.link(root / "symbolic", root / "b")
        assert not ops.exists(root / "b")
        assert ops.read_bytes(root / "other") == b"other"

    def test_a_link_is_pointed_elsewhere_and_read(self, ops: FileOps, root: Path) -> None:
        ops.write_file(root / "file", b"")
        self.plant_link(ops, root / ".link.new", root / "file")  # left by a crash
        for target in ("one", "two"):
            ops.point_link(root / "link", target)
            assert ops.read_link(root / "link") == target
        assert ops.read_link(root / "file") is None
        assert ops.read_link(root / "missing") is None
        assert ops.listdir(root) == ["file", "link"]

    def test_a_link_takes_no_directorys_place(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "folder")
        with _raises(IsADirectoryError):
            ops.point_link(root / "folder", "elsewhere")
        assert ops.listdir(root) == ["folder"]

    def test_nothing_is_read_of_a_file_that_is_too_large(self, ops: FileOps, root: Path) -> None:
        ops.write_file(root / "file", b"12345")
        assert ops.read_bytes(root / "file", max_bytes=5) == b"12345"
        with _raises(StorageError):
            ops.read_bytes(root / "file", max_bytes=4)

    def test_a_link_is_listed_as_one(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "folder")
        ops.write_file(root / "file", b"")
        self.plant_link(ops, root / "link", root / "folder")
        assert ops.scan(root) == {
            "file": Kind.FILE,
            "folder": Kind.DIRECTORY,
            "link": Kind.LINK,
        }
        assert list(ops.scan(root, beginning=("fi", "li"))) == ["file", "link"]
        assert ops.kind(root / "link") is Kind.LINK
        assert ops.kind(root / "missing") is None
        assert ops.exists(root / "link")
        assert not ops.is_dir(root / "link")

    def test_a_link_is_neither_read_nor_written_through(self, ops: FileOps, root: Path) -> None:
        ops.write_file(root / "file", b"kept")
        self.plant_link(ops, root / "link", root / "file")
        link = root / "link"
        for refused in (
            lambda: ops.read_bytes(link),
            lambda: ops.file_size(link),
            lambda: ops.open_for_read(link),
            lambda: ops.write_file(link, b"changed"),
            lambda: ops.append_line(link, "changed"),
            lambda: ops.sync_file(link),
        ):
            with _raises(ForeignEntryError):
                refused()
        with _raises(FileExistsError):
            ops.create_payload(link, num_bytes=1)
        assert ops.read_bytes(root / "file") == b"kept"

    def test_no_path_leads_through_a_link(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "folder")
        ops.write_file(root / "folder" / "file", b"kept")
        self.plant_link(ops, root / "link", root / "folder")
        inside = root / "link" / "file"
        for refused in (
            lambda: ops.listdir(root / "link"),
            lambda: ops.scan(root / "link"),
            lambda: ops.sync_dir(root / "link"),
            lambda: ops.kind(inside),
            lambda: ops.read_bytes(inside),
            lambda: ops.write_file(inside, b"changed"),
            lambda: ops.unlink(inside),
            lambda: ops.rename(inside, root / "moved"),
            lambda: ops.rename(root / "folder" / "file", root / "link" / "moved"),
            lambda: ops.mkdir(root / "link" / "new"),
        ):
            with _raises(ForeignEntryError):
                refused()
        assert ops.listdir(root / "folder") == ["file"]

    def test_a_link_is_moved_and_removed_itself(self, ops: FileOps, root: Path) -> None:
        ops.mkdir(root / "tree" / "sub", parents=True)
        ops.write_file(root / "kept", b"kept")
        self.plant_link(ops, root / "link", root / "kept")
        self.plant_link(ops, root / "tree" / "sub" / "link", root / "kept")
        ops.rename(root / "link", root / "moved")
        with _raises(NotADirectoryError):
            ops.remove_tree(root / "moved")
        ops.remove_tree(root / "tree")
        self.plant_link(ops, root / ".file.new", root / "kept")
        self.plant_link(ops, root / "file", root / "kept")
        ops.replace_file(root / "file", b"new")
        ops.unlink(root / "moved")
        assert ops.listdir(root) == ["file", "kept"]
        assert (ops.read_bytes(root / "file"), ops.read_bytes(root / "kept")) == (b"new", b"kept")

    def test_append_line_closes_a_torn_last_line(self, ops: FileOps, root: Path) -> None:
        ops.append_line(root / "log", "one")
        ops.append_line(root / "log", "two")
        assert ops.read_bytes(root / "log") == b"one\ntwo\n"
        ops.write_file(root / "log", b"one\ntw")
        ops.append_line(root / "log", "three")
        assert ops.read_bytes(root / "log") == b"one\ntw\nthree\n"

    def test_free_bytes_counts_what_can_be_written(self, ops: FileOps, root: Path) -> None:
        assert ops.free_bytes(root) > 0
        with _raises(FileNotFoundError):
            ops.free_bytes(root / "missing")

    def test_payload_is_written_by_many_threads(self, ops: FileOps, root: Path) -> None:
        data = os.urandom(64 * PAGE_BYTES)
        source = memoryview(page_aligned(data))
        file = ops.create_payload(root / "payload", num_bytes=len(data))
        step = 2 * PAGE_BYTES
        with ThreadPoolExecutor(4) as threads:
            starts = range(0, len(data), step)
            list(threads.map(lambda start: file.pwrite(source[start:][:step], start), starts))
        file.truncate(len(data) - 1000)
        file.datasync()
        file.close()
        file.close()
        assert ops.read_bytes(root / "payload") == data[:-1000]

    def test_payload_takes_unaligned_writes_buffered(self, ops: FileOps, root: Path) -> None:
        source = memoryview(page_aligned(b"x" * PAGE_BYTES + b"tail"))
        file = ops.create_payload(root / "payload", num_bytes=PAGE_BYTES + 4)
        file.pwrite(source[:PAGE_BYTES], 0)
        file.pwrite(source[PAGE_BYTES : PAGE_BYTES + 4], PAGE_BYTES)
        file.truncate(PAGE_BYTES + 4)
        file.datasync()
        file.close()
        assert ops.read_bytes(root / "payload") == b"x" * PAGE_BYTES + b"tail"

    def test_payload_is_never_created_over_a_file(self, ops: FileOps, root: Path) -> None:
        ops.create_payload(root / "payload", num_bytes=0).close()
        with _raises(FileExistsError):
            ops.create_payload(root / "payload", num_bytes=0)
        with _raises(FileNotFoundError):
            ops.create_payload(root / "missing" / "payload", num_bytes=0)
        assert ops.file_size(root / "payload") == 0

    def test_reads_are_short_only_at_the_end(self, ops: FileOps, root: Path) -> None:
        data = os.urandom(3 * PAGE_BYTES + 100)
        ops.write_file(root / "file", data)
        target = memoryview(page_aligned(bytes(8 * PAGE_BYTES)))
        file = ops.open_for_read(root / "file")
        assert file.size == len(data)
        assert file.preadinto(target, 0) == len(data)
        assert target[: len(data)] == data
        assert file.preadinto(target[:PAGE_BYTES], PAGE_BYTES) == PAGE_BYTES
        assert target[:PAGE_BYTES] == data[PAGE_BYTES : 2 * PAGE_BYTES]
        assert file.preadinto(target, 3 * PAGE_BYTES) == 100
        assert file.preadinto(target, 4 * PAGE_BYTES) == 0
        file.close()
        file.close()

    def test_reads_may_be_unaligned(self, ops: FileOps, root: Path) -> None:
        ops.write_file(root / "file", b"0123456789")
        target = bytearray(4)
        file = ops.open_for_read(root / "file")
        assert file.preadinto(memoryview(target), 3) == 4
        file.close()
        assert target == b"3456"


@contextlib.contextmanager
def _raises(kind: type[OSError]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def page_aligned(data: bytes) -> mmap.mmap:
    """A page-aligned copy of the bytes, padded with zeros to a whole page."""
    memory = mmap.mmap(-1, max(-(-len(data) // PAGE_BYTES), 1) * PAGE_BYTES)
    memory[: len(data)] = data
    return memory
