"""Reading files: everything is verified, at any size of chunk, or nothing is returned."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from checkfreq.errors import CorruptCheckpointError
from checkfreq.restore.file_reader import buffer_bytes, read_files
from checkfreq.store.fileops import LocalFileOps, ReadFile
from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry, digest_of
from checkfreq.store.source import Piece
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes, page_aligned

PAGE = 4096
FILES = {"model.safetensors": bytes(range(256)) * 100, "optimizer.safetensors": b"x" * 10}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path)
    made.open()
    commit_bytes(made, 1, FILES)
    return made


def read(
    store: CheckpointStore, manifest: Manifest | None = None, *, chunk_bytes: int = 8 << 20
) -> Mapping[str, memoryview]:
    manifest = manifest or store.manifest(1)
    buffer = memoryview(mmap.mmap(-1, max(buffer_bytes(manifest.files), PAGE)))
    return read_files(
        store, manifest.step, manifest.files, buffer, num_threads=2, chunk_bytes=chunk_bytes
    )


def damage(store: CheckpointStore, name: str, at: int) -> None:
    path = store.path(1) / name
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, PAGE, 3 * PAGE, 8 << 20])
def test_every_byte_arrives_at_any_chunk_size(store: CheckpointStore, chunk_bytes: int) -> None:
    if chunk_bytes < 100:
        commit_bytes(store, 1, {"small.safetensors": b"abc"}, supersede_after=0)
    found = read(store, chunk_bytes=chunk_bytes)
    assert {*found} == {file.name for file in store.manifest(1).files}
    for name, data in found.items():
        assert data == (store.path(1) / name).read_bytes()


class InPieces(CheckpointStore):
    """Every page of a file is a piece, as a mirror might keep it; with the digests of now."""

    def __init__(self, store: CheckpointStore) -> None:
        super().__init__(store.root)
        self._sound = {name: (store.path(1) / name).read_bytes() for name in FILES}

    def pieces(self, step: int, entry: FileEntry) -> Sequence[Piece]:
        data = self._sound[entry.name]
        pages = (data[at : at + PAGE] for at in range(0, len(data), PAGE))
        return [
            Piece(n * PAGE, len(page), xxh3_128_hexdigest(page)) for n, page in enumerate(pages)
        ]


@pytest.mark.parametrize("chunk_bytes", [PAGE, 2 * PAGE, 8 << 20])
def test_a_file_in_pieces_arrives_whole(store: CheckpointStore, chunk_bytes: int) -> None:
    found = read(InPieces(store), chunk_bytes=chunk_bytes)
    for name, data in found.items():
        assert data == (store.path(1) / name).read_bytes()


def test_a_changed_byte_names_the_piece_that_it_is_in_before_what_is_in_the_piece(
    store: CheckpointStore,
) -> None:
    in_pieces = InPieces(store)
    damage(store, "model.safetensors", 5)
    with pytest.raises(CorruptCheckpointError, match="digest of piece 0"):
        read(in_pieces)


def test_each_file_begins_at_a_page_and_the_buffer_has_room_for_that(
    store: CheckpointStore,
) -> None:
    manifest = store.manifest(1)
    sizes = [-(-file.num_bytes // PAGE) * PAGE for file in manifest.files]
    assert buffer_bytes(manifest.files) == sum(sizes)
    buffer = memoryview(mmap.mmap(-1, buffer_bytes(manifest.files)))
    read_files(store, manifest.step, manifest.files, buffer)
    start = 0
    for file, size in zip(manifest.files, sizes, strict=True):
        data = (store.path(1) / file.name).read_bytes()
        assert buffer[start : start + file.num_bytes] == data
        start += size


def test_tensors_without_elements_have_a_place_and_a_digest(store: CheckpointStore) -> None:
    commit_bytes(store, 2, {"empty.safetensors": b""})
    ((tensor,),) = [file.tensors for file in store.manifest(2).files]
    assert tensor.num_bytes == 0
    for chunk_bytes in (1, 8 << 20):
        assert {*read(store, chunk_bytes=chunk_bytes, manifest=store.manifest(2))} == {
            "empty.safetensors"
        }


def test_a_checkpoint_without_files_is_read_as_nothing(store: CheckpointStore) -> None:
    commit_bytes(store, 2, {})
    assert read(store, store.manifest(2)) == {}


@pytest.mark.parametrize("chunk_bytes", [PAGE, 8 << 20])
@pytest.mark.parametrize(("at", "what"), [(9, "digest of header"), (-1, "digest of tensor data")])
def test_a_changed_byte_is_corruption_that_names_file_and_part(
    store: CheckpointStore, at: int, what: str, chunk_bytes: int
) -> None:
    damage(store, "model.safetensors", at)
    with pytest.raises(CorruptCheckpointError) as caught:
        read(store, chunk_bytes=chunk_bytes)
    assert caught.value.path == str(store.path(1) / "model.safetensors")
    assert caught.value.check == what
    assert caught.value.expected != caught.value.got


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_the_wrong_size_is_corruption(store: CheckpointStore, change: int) -> None:
    path = store.path(1) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"x")
    with pytest.raises(CorruptCheckpointError, match="size"):
        read(store)


def test_a_missing_file_is_corruption(store: CheckpointStore) -> None:
    (store.path(1) / "optimizer.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.safetensors"):
        read(store)


class Shrinking(LocalFileOps):
    """Files that lose their last page between being opened and being read; or fail."""

    def __init__(self, root: Path, error: OSError | None = None) -> None:
        super().__init__(root)
        self._error = error
        self.closed = 0

    def open_for_read(self, path: Path) -> ReadFile:
        return _ShortRead(super().open_for_read(path), self)


class _ShortRead:
    def __init__(self, file: ReadFile, ops: Shrinking) -> None:
        self._file, self._ops = file, ops

    @property
    def size(self) -> int:
        return self._file.size

    @property
    def direct(self) -> bool:
        return self._file.direct

    def preadinto(self, view: memoryview, offset: int) -> int:
        if self._ops._error is not None:
            raise self._ops._error
        return self._file.preadinto(view, offset) - 1

    def close(self) -> None:
        self._ops.closed += 1
        self._file.close()


def test_a_short_read_is_a_disk_error_not_corruption(store: CheckpointStore) -> None:
    ops = Shrinking(store.root)
    with pytest.raises(OSError, match="the file shrank"):
        read(CheckpointStore(store.root, ops=ops))
    assert ops.closed == len(FILES)


def test_a_read_error_passes_through_and_closes_everything(store: CheckpointStore) -> None:
    ops = Shrinking(store.root, OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        read(CheckpointStore(store.root, ops=ops), chunk_bytes=PAGE)
    assert ops.closed == len(FILES)


def test_tensors_are_checked_in_groups_of_about_a_chunk(store: CheckpointStore) -> None:
    """Many small tensors, one of them damaged: found at any grouping."""
    header = page_aligned(b"h" * PAGE)[:PAGE]
    data = bytes(range(250)) * 40
    tensors = tuple(
        TensorEntry(f"t{i}", "uint8", (100,), PAGE + i * 100, 100, digest_of(data[i * 100 :][:100]))
        for i in range(100)
    )
    entry = FileEntry("many.safetensors", PAGE + len(data), PAGE, digest_of(header), tensors)
    pending = store.begin(3, attempt="many")
    payload = pending.create_payload(entry.name, entry.num_bytes)
    image = page_aligned(header + data)
    payload.pwrite(memoryview(image), 0)
    pending.finish_payload(payload, entry.num_bytes)
    store.commit(pending, Manifest(3, "many", 1, 0.0, {}, (entry,), {}))
    manifest = store.manifest(3)
    for chunk_bytes in (PAGE, 2 * PAGE, 1 << 20):
        assert read(store, manifest, chunk_bytes=chunk_bytes)
    path = store.path(3) / entry.name
    damaged = bytearray(path.read_bytes())
    damaged[PAGE + 5050] ^= 1
    path.write_bytes(damaged)
    for chunk_bytes in (PAGE, 2 * PAGE, 1 << 20):
        with pytest.raises(CorruptCheckpointError, match="digest of tensor t50"):
            read(store, manifest, chunk_bytes=chunk_bytes)
