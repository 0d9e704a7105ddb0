"""Streaming: every wanted byte arrives in its place, and every byte that is read is verified."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkfreq.errors import CorruptCheckpointError
from checkfreq.restore.buffers import MemoryTarget
from checkfreq.restore.stream import MOST_THREADS, SlowReads, Wanted, stream
from checkfreq.store.fileops import ReadFile
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.source import Piece
from checkfreq.store.store import CheckpointStore
from tests.restore.written import PAGE, Watched, commit_tensors, damage

DEADLINE_S = 60
PATTERN = bytes(range(251)) * 400
FILES = {
    "model.safetensors": {
        "small": PATTERN[:7],
        "empty": b"",
        "large": PATTERN[3 : 3 + 9 * PAGE + 5],
        "tiny": b"z",
        "page": PATTERN[11 : 11 + PAGE],
    },
    "optimizer.safetensors": {"state": PATTERN[5 : 5 + 6 * PAGE]},
}


@pytest.fixture(params=[0, 100, PAGE + 1], ids="pieces of {}".format)
def store(tmp_path: Path, request: pytest.FixtureRequest) -> CheckpointStore:
    """The files with one digest per tensor, as in formats 1 and 2, and with one per piece."""
    made = CheckpointStore(tmp_path)
    made.open()
    commit_tensors(made, 1, FILES, piece_bytes=request.param)
    return made


class Places:
    """A bytearray for each tensor, and what is wanted to fill them."""

    def __init__(self, manifest: Manifest) -> None:
        self.wanted: list[Wanted] = []
        self.found: dict[str, bytearray] = {}
        for file in manifest.files:
            for tensor in file.tensors:
                self.found[tensor.name] = bytearray(tensor.num_bytes)
                target = MemoryTarget.of(memoryview(self.found[tensor.name]))
                self.wanted.append(Wanted(file, tensor, target))

    def are(self, files: Mapping[str, Mapping[str, bytes]]) -> bool:
        """Whether each tensor has arrived."""
        expected = {name: data for tensors in files.values() for name, data in tensors.items()}
        return self.found == expected


def verify(store: CheckpointStore, **options: bool) -> None:
    manifest = store.manifest(1)
    wanted = [Wanted(file, tensor, None) for file in manifest.files for tensor in file.tensors]
    stream(store, 1, wanted, num_threads=2, read_bytes=PAGE, **options)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("read_bytes", [PAGE, None])
def test_every_byte_arrives_in_its_place(
    store: CheckpointStore, read_bytes: int | None, num_threads: int
) -> None:
    places = Places(store.manifest(1))
    arrived: list[int] = []
    stream(
        store,
        1,
        places.wanted,
        num_threads=num_threads,
        read_bytes=read_bytes,
        on_read=arrived.append,
    )
    assert places.are(FILES)
    assert sum(arrived) == store.manifest(1).num_bytes


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_ranges_of_any_tensors_arrive_and_no_others(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5 * PAGE), min_size=1, max_size=6))
    tensors = {f"t{n}": PATTERN[n : n + size] for n, size in enumerate(sizes)}
    store = CheckpointStore(tmp_path_factory.mktemp("any"))
    store.open()
    piece_bytes = data.draw(st.sampled_from([0, 1000, PAGE, 3 * PAGE]))
    manifest = commit_tensors(store, 1, {"some.safetensors": tensors}, piece_bytes=piece_bytes)
    wanted, expected, found = [], [], []
    for tensor in manifest.files[0].tensors:
        cuts = sorted(data.draw(st.sets(st.integers(0, tensor.num_bytes), max_size=6)))
        ranges = tuple(zip(cuts[::2], cuts[1::2], strict=False))
        place = bytearray(tensor.num_bytes)
        right = bytearray(tensor.num_bytes)
        for begin, end in ranges:
            right[begin:end] = tensors[tensor.name][begin:end]
        target = MemoryTarget.of(memoryview(place))
        wanted.append(Wanted(manifest.files[0], tensor, target, ranges))
        expected.append(right)
        found.append(place)
    pages = data.draw(st.integers(1, 3))
    stream(store, 1, wanted, num_threads=2, read_bytes=pages * PAGE)
    assert found == expected


@pytest.mark.parametrize("name", ["nothing", "large", "empty"])
def test_what_has_no_bytes_that_are_wanted_is_not_read(
    tmp_path: Path, store: CheckpointStore, name: str
) -> None:
    ops = Watched(tmp_path)
    wanted = [
        Wanted(item.file, item.tensor, item.target, ranges=() if name == "large" else None)
        for item in Places(store.manifest(1)).wanted
        if item.tensor.name == name
    ]
    stream(CheckpointStore(tmp_path, ops=ops), 1, wanted, verify_headers=False)
    assert ops.opened == len(wanted)
    assert not ops.reads


def test_of_a_tensor_in_pieces_only_those_are_read_that_are_wanted(
    tmp_path: Path, store: CheckpointStore
) -> None:
    data = PATTERN[: 16 * PAGE]
    commit_tensors(store, 2, {"cut.safetensors": {"rows": data}}, piece_bytes=2 * PAGE)
    (file,) = store.manifest(2).files
    ops, arrived, place = Watched(tmp_path), [], bytearray(len(data))
    ranges = ((PAGE, PAGE + 1), (4 * PAGE - 1, 5 * PAGE), (14 * PAGE, 16 * PAGE))
    target = MemoryTarget.of(memoryview(place))
    stream(
        CheckpointStore(tmp_path, ops=ops),
        2,
        [Wanted(file, file.tensors[0], target, ranges)],
        read_bytes=2 * PAGE,
        on_read=arrived.append,
        verify_headers=False,
    )
    # Behind a header of a page.
    starts = [PAGE, 3 * PAGE, 5 * PAGE, 15 * PAGE]
    assert sorted(ops.reads) == [(start, 2 * PAGE) for start in starts]
    assert sum(arrived) == 8 * PAGE
    for begin, end in ranges:
        assert place[begin:end] == data[begin:end]


def test_what_lies_a_page_or_more_between_two_tensors_is_not_read(
    tmp_path: Path, store: CheckpointStore
) -> None:
    ops = Watched(tmp_path)
    wanted = [item for item in Places(store.manifest(1)).wanted if item.tensor.name != "large"]
    stream(CheckpointStore(tmp_path, ops=ops), 1, wanted, verify_headers=False, num_threads=1)
    assert sorted(ops.reads) == [(PAGE, PAGE), (PAGE, 6 * PAGE), (10 * PAGE, 2 * PAGE)]


def test_a_tensor_that_is_wanted_twice_is_read_once(tmp_path: Path, store: CheckpointStore) -> None:
    ops = Watched(tmp_path)
    one, other = Places(store.manifest(1)), Places(store.manifest(1))
    part = [Wanted(item.file, item.tensor, None, ranges=((0, 1),)) for item in one.wanted]
    stream(CheckpointStore(tmp_path, ops=ops), 1, [*part, *one.wanted, *other.wanted])
    assert one.are(FILES)
    assert other.are(FILES)
    assert len(ops.reads) == 2


# ---- what is wrong


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (9, "digest of header"),
        (PAGE + 6, "digest of tensor small"),
        (PAGE + 7, "digest of tensor large"),
        (10 * PAGE + 11, "digest of tensor large"),
        (-1, "digest of tensor page"),
    ],
)
def test_a_changed_byte_is_corruption_that_names_file_and_tensor(
    store: CheckpointStore, at: int, what: str
) -> None:
    damage(store, 1, "model.safetensors", at)
    with pytest.raises(CorruptCheckpointError) as caught:
        verify(store)
    assert caught.value.path == str(store.path(1) / "model.safetensors")
    assert re.fullmatch(rf"{what}(, bytes \d+ to \d+)?", caught.value.check)
    assert caught.value.expected != caught.value.got


def test_headers_need_not_be_verified(store: CheckpointStore) -> None:
    damage(store, 1, "model.safetensors", 9)
    verify(store, verify_headers=False)


@pytest.mark.parametrize("change", ["short", "long", "gone"])
def test_a_file_of_the_wrong_size_or_none_is_corruption(
    store: CheckpointStore, change: str
) -> None:
    path = store.path(1) / "optimizer.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] if change == "short" else data + b"x")
    if change == "gone":
        path.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.safetensors"):
        verify(store)


@pytest.mark.parametrize("is_short", [True, False])
def test_a_read_that_fails_or_is_short_is_a_disk_error_and_closes_everything(
    store: CheckpointStore, tmp_path: Path, fault_script: Callable[[str], None], is_short: bool
) -> None:
    ops = Watched(tmp_path, short=int(is_short))
    if not is_short:
        fault_script("restore.read:raise-EIO:3")
    with pytest.raises(OSError, match="the file shrank" if is_short else "Input/output error"):
        verify(CheckpointStore(tmp_path, ops=ops))
    assert ops.closed == ops.opened == len(FILES)


@pytest.mark.parametrize(
    "tensors", [dict.fromkeys("abcdefgh", PATTERN), dict.fromkeys("abcdefgh", PATTERN[:PAGE])]
)
def test_after_an_error_the_other_threads_stop_at_once(
    tmp_path: Path, store: CheckpointStore, tensors: Mapping[str, bytes]
) -> None:
    """The first read fails; the second one lasts until the thread of the first has ended."""
    commit_tensors(store, 2, {"header.safetensors": {}, "large.safetensors": tensors})
    failed: list[threading.Thread] = []
    second = threading.Event()

    def disturb(number: int) -> None:
        if number == 1:
            failed.append(threading.current_thread())
            assert second.wait(DEADLINE_S)
            raise OSError(5, "Input/output error")
        if number == 2:
            second.set()
            failed[0].join(DEADLINE_S)
            assert not failed[0].is_alive()

    ops = Watched(tmp_path, disturb=disturb)
    with pytest.raises(OSError, match="Input/output error"):
        stream(
            CheckpointStore(tmp_path, ops=ops),
            2,
            Places(store.manifest(2)).wanted,
            num_threads=2,
            read_bytes=PAGE,
        )
    assert len(ops.reads) == 2


# ---- slow file systems


def slow_reads() -> Callable[[], float]:
    """A clock by which every read takes a second."""
    return itertools.count().__next__


def test_however_slow_reads_are_no_more_than_sixteen_are_in_flight(
    tmp_path: Path, store: CheckpointStore
) -> None:
    """Three threads are asked for: twice as many, twice, and only four of the next twelve."""
    tensors = {f"t{n}": PATTERN[n : n + PAGE] for n in range(100)}
    commit_tensors(store, 2, {"some.safetensors": tensors})
    readers: set[str] = set()
    together = threading.Barrier(MOST_THREADS)

    def disturb(number: int) -> None:
        readers.add(threading.current_thread().name)
        if 36 < number <= 36 + MOST_THREADS:
            together.wait(DEADLINE_S)

    places = Places(store.manifest(2))
    stream(
        CheckpointStore(tmp_path, ops=Watched(tmp_path, disturb=disturb)),
        2,
        places.wanted,
        num_threads=3,
        read_bytes=PAGE,
        verify_headers=False,
        clock=slow_reads(),
    )
    assert places.are({"some.safetensors": tensors})
    assert len(readers) == MOST_THREADS


def test_a_thread_that_cannot_be_started_ends_the_others_and_is_raised(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        begin(thread)

    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        stream(store, 1, Places(store.manifest(1)).wanted, num_threads=3, read_bytes=PAGE)
    assert threading.active_count() == before


def test_only_as_many_slow_reads_in_a_row_as_there_are_threads_ask_for_more() -> None:
    reads = SlowReads()
    assert not any(reads.note(float(number % 8 == 0), 4) for number in range(100))
    assert [reads.note(1.0, 4) for _ in range(8)] == [False, False, False, True] * 2


def test_with_one_thread_all_is_read_in_the_callers(tmp_path: Path, store: CheckpointStore) -> None:
    seen: set[int] = set()
    ops = Watched(tmp_path, disturb=lambda number: seen.add(threading.get_ident()))
    places = Places(store.manifest(1))
    stream(
        CheckpointStore(tmp_path, ops=ops),
        1,
        places.wanted,
        num_threads=1,
        read_bytes=PAGE,
        clock=slow_reads(),
    )
    assert seen == {threading.get_ident()}
    assert places.are(FILES)


# ---- targets that copy later


class Later:
    """A target that copies when it is waited for, and may fail then."""

    def __init__(self, num_bytes: int, error: Exception | None = None) -> None:
        self.found = bytearray(num_bytes)
        self.under_way = 0
        self._error = error

    def put(self, start: int, data: memoryview) -> Callable[[], None]:
        self.under_way += 1

        def wait() -> None:
            self.under_way -= 1
            if self._error is not None:
                raise self._error
            self.found[start : start + len(data)] = data

        return wait


def late_targets(manifest: Manifest, error: Exception | None = None) -> dict[str, Later]:
    return {t.name: Later(t.num_bytes, error) for file in manifest.files for t in file.tensors}


def wanted_late(manifest: Manifest, targets: Mapping[str, Later]) -> list[Wanted]:
    return [Wanted(file, t, targets[t.name]) for file in manifest.files for t in file.tensors]


def test_a_buffer_is_not_used_again_before_the_copies_from_it_are_done(
    store: CheckpointStore,
) -> None:
    manifest = store.manifest(1)
    targets = late_targets(manifest)
    stream(store, 1, wanted_late(manifest, targets), num_threads=2, read_bytes=PAGE)
    assert {name: bytes(target.found) for name, target in targets.items()} == {
        name: data for tensors in FILES.values() for name, data in tensors.items()
    }


@pytest.mark.parametrize("fails", ["a read", "each copy"])
def test_after_an_error_no_copy_is_under_way(store: CheckpointStore, fails: str) -> None:
    manifest, lost = store.manifest(1), RuntimeError("the device is lost")
    targets = late_targets(manifest, None if fails == "a read" else lost)
    if fails == "a read":
        damage(store, 1, "model.safetensors", PAGE + 8)
    with pytest.raises((CorruptCheckpointError, RuntimeError), match=r"digest|the device is lost"):
        stream(store, 1, wanted_late(manifest, targets))
    assert not any(target.under_way for target in targets.values())


# ---- sources that are no plain directory


class InMemory:
    """A file whose bytes are in memory."""

    direct = False

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size = len(data)

    def preadinto(self, view: memoryview, offset: int) -> int:
        raise AssertionError("bytes in memory are not read into a buffer")

    def view(self, start: int, num_bytes: int) -> memoryview:
        return self._data[start : start + num_bytes]

    def close(self) -> None:
        self._data = memoryview(b"")


class MemoryStore(CheckpointStore):
    """Files come from memory."""

    def open_payload(self, step: int, entry: FileEntry) -> ReadFile:
        return InMemory((self.path(step) / entry.name).read_bytes())


def test_bytes_that_are_in_memory_are_copied_from_there(store: CheckpointStore) -> None:
    manifest = store.manifest(1)
    places, targets = Places(manifest), late_targets(manifest)
    wanted = [*places.wanted, *wanted_late(manifest, targets)]
    stream(MemoryStore(store.root), 1, wanted, read_bytes=PAGE)
    assert places.are(FILES)
    assert bytes(targets["large"].found) == FILES["model.safetensors"]["large"]


#: The tensors with which an object ends.
ENDS = ("tiny", "page", "state")


class InPieces(CheckpointStore):
    """Files are stored as objects that end after certain tensors, as in a mirror."""

    num_requests = 3

    def pieces(self, step: int, entry: FileEntry) -> Sequence[Piece]:
        ends = [t.offset + t.num_bytes for t in entry.in_file_order() if t.name in ENDS]
        starts = [0, *ends[:-1]]
        return [Piece(start, end - start, "") for start, end in zip(starts, ends, strict=True)]


def test_no_read_crosses_the_border_of_two_pieces(tmp_path: Path, store: CheckpointStore) -> None:
    ops = Watched(tmp_path)
    places = Places(store.manifest(1))
    stream(InPieces(tmp_path, ops=ops), 1, places.wanted, read_bytes=64 * PAGE)
    assert places.are(FILES)
    assert sorted(ops.reads) == [(0, 7 * PAGE), (0, 11 * PAGE), (10 * PAGE, 2 * PAGE)]
