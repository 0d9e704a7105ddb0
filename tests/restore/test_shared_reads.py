"""Members that share reads: each piece is read by one, all get all bytes, whatever goes wrong."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkfreq.errors import CorruptCheckpointError
from checkfreq.restore.buffers import MemoryTarget
from checkfreq.restore.shared_reads import SharedReads
from checkfreq.restore.shared_ring import MOST_BYTES, SharedRing, slots_for
from checkfreq.restore.stream import Wanted, stream
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.store import CheckpointStore
from tests.restore.written import PAGE, Watched, commit_tensors, damage

DEADLINE_S = 60.0
PATTERN = bytes(range(251)) * 8000
FILES = {
    "model.safetensors": {f"m{n}": PATTERN[n : n + 3 * PAGE + n] for n in range(60)},
    "optimizer.safetensors": {f"o{n}": PATTERN[n : n + PAGE // 2] for n in range(90)},
}


@contextlib.contextmanager
def sharing(
    num_members: int, *, patience_s: float = DEADLINE_S, num_slots: int | None = None
) -> Iterator[list[SharedReads]]:
    """Members in this process, with all that they have between processes."""
    peers: list[dict[int, socket.socket]] = [{} for _ in range(num_members)]
    for a, b in itertools.combinations(range(num_members), 2):
        peers[a][b], peers[b][a] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    slots = num_slots or slots_for(num_members, read_bytes=PAGE)
    fd = SharedRing.create(slots, read_bytes=PAGE)
    members = [
        SharedReads(
            SharedRing(fd, slots, read_bytes=PAGE),
            member=number,
            peers=own,
            patience_s=lambda: patience_s,
        )
        for number, own in enumerate(peers)
    ]
    os.close(fd)
    try:
        yield members
    finally:
        for one in members:
            one.close()


class Member:
    """One that restores: its own file operations, and a place for every tensor."""

    def __init__(
        self,
        root: Path,
        shared: SharedReads | None,
        *,
        disturb: Callable[[int], object] = lambda number: None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.ops = Watched(root, disturb=disturb)
        self.shared = shared
        self.found: dict[str, bytearray] = {}
        self._store = CheckpointStore(root, ops=self.ops)
        self._names = names

    def read(self, num_threads: int = 3) -> None:
        """One stage with one round."""
        assert self.shared is not None
        with self.shared.stage():
            self.stream(num_threads)

    def stream(self, num_threads: int = 3) -> None:
        """One round."""
        wanted = [self._wanted(f, t) for f in self._files() for t in f.tensors]
        stream(self._store, 1, wanted, num_threads=num_threads, read_bytes=PAGE, shared=self.shared)

    def _files(self) -> list[FileEntry]:
        files = self._store.manifest(1).files
        return [file for file in files if self._names is None or file.name in self._names]

    def _wanted(self, file: FileEntry, tensor: object) -> Wanted:
        place = self.found[tensor.name] = bytearray(tensor.num_bytes)
        return Wanted(file, tensor, MemoryTarget.of(memoryview(place)))

    @property
    def has_all(self) -> bool:
        """Whether every tensor of the checkpoint is there."""
        return self.found == {name: data for file in FILES.values() for name, data in file.items()}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of a directory with a checkpoint of `FILES`, in pieces of a page at most."""
    store = CheckpointStore(tmp_path)
    store.open()
    commit_tensors(store, 1, FILES, piece_bytes=PAGE)
    return tmp_path


def manifest(root: Path) -> Manifest:
    return CheckpointStore(root).manifest(1)


def read_together(members: Sequence[Member], **options: int) -> list[BaseException | None]:
    """What each raised."""
    with ThreadPoolExecutor(len(members)) as pool:
        reading = [pool.submit(one.read, **options) for one in members]
        return [one.exception(DEADLINE_S) for one in reading]


def num_reads(members: Sequence[Member]) -> Counter[tuple[int, int]]:
    """How often each place of a file was read, by all together."""
    return Counter(itertools.chain.from_iterable(one.ops.reads for one in members))


def alone(root: Path) -> int:
    """How many reads one member makes that shares with nobody."""
    one = Member(root, None)
    one.stream()
    assert one.has_all
    return len(one.ops.reads)


@pytest.mark.parametrize(
    ("num_members", "num_threads", "num_slots"),
    [(2, 1, None), (3, 4, None), (3, 3, 3), (4, 4, None)],
)
def test_each_piece_is_read_by_one_member_and_all_members_get_all_bytes(
    root: Path, num_members: int, num_threads: int, num_slots: int | None
) -> None:
    with sharing(num_members, num_slots=num_slots) as shared:
        members = [Member(root, one) for one in shared]
        assert read_together(members, num_threads=num_threads) == [None] * num_members
    assert all(one.has_all for one in members)
    assert sum(num_reads(members).values()) == alone(root)
    reads = [len(one.ops.reads) for one in members]
    assert max(reads) - min(reads) <= 1


def test_rounds_and_stages_follow_one_another(root: Path) -> None:
    def twice(one: Member) -> None:
        for _ in range(2):
            with one.shared.stage():
                one.stream()
                one.stream()

    with sharing(2) as shared, ThreadPoolExecutor(2) as pool:
        members = [Member(root, one) for one in shared]
        for done in [pool.submit(twice, one) for one in members]:
            done.result(DEADLINE_S)
    assert all(one.has_all for one in members)
    assert sum(num_reads(members).values()) == 4 * alone(root)


def test_only_files_that_all_members_read_are_shared(root: Path) -> None:
    with sharing(2) as shared:
        members = [
            Member(root, shared[0]),
            Member(root, shared[1], names=["optimizer.safetensors"]),
        ]
        assert read_together(members) == [None, None]
    assert members[0].has_all
    assert members[1].found == {n: members[0].found[n] for n in FILES["optimizer.safetensors"]}
    assert sum(num_reads(members).values()) == alone(root)


def test_what_has_one_digest_and_takes_many_reads_is_read_by_every_member(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.open()
    commit_tensors(store, 1, FILES)
    with sharing(2) as shared:
        members = [Member(tmp_path, one) for one in shared]
        assert read_together(members) == [None, None]
    assert all(one.has_all for one in members)
    assert alone(tmp_path) < sum(num_reads(members).values()) < 2 * alone(tmp_path)


@pytest.mark.parametrize("fatal", [0, 9, 90])
def test_when_one_member_fails_at_any_read_the_others_get_all_bytes_nonetheless(
    root: Path, fatal: int
) -> None:
    def fail(number: int) -> None:
        if number == fatal:
            raise OSError("the disk fails")

    with sharing(3) as shared:
        members = [
            Member(root, shared[n], **({"disturb": fail} if n == 1 else {})) for n in range(3)
        ]
        first, failed, last = read_together(members)
    assert (first, last) == (None, None)
    assert members[0].has_all
    assert members[2].has_all
    assert isinstance(failed, OSError) or members[1].has_all


def test_damage_is_found_by_every_member_whoever_read_it(root: Path) -> None:
    file = manifest(root).files[0]
    for tensor in file.tensors[:2]:
        store = CheckpointStore(root)
        damage(store, 1, file.name, tensor.offset)
        with sharing(2) as shared:
            members = [Member(root, one) for one in shared]
            errors = read_together(members)
        damage(store, 1, file.name, tensor.offset)  # which mends it
        assert all(isinstance(error, CorruptCheckpointError) for error in errors)
        assert all(tensor.name in str(error) for error in errors)


def test_whoever_waits_for_a_member_that_hangs_reads_for_itself_in_the_end(root: Path) -> None:
    let_go = threading.Event()
    with sharing(2, patience_s=0.2) as shared:
        reader = Member(root, shared[0])
        hangs = Member(root, shared[1], disturb=lambda number: let_go.wait(DEADLINE_S))
        with ThreadPoolExecutor(2) as pool:
            hanging = pool.submit(hangs.read)
            try:
                pool.submit(reader.read).result(DEADLINE_S)
            finally:
                let_go.set()
            assert hanging.exception(DEADLINE_S) is None
    assert reader.has_all
    assert hangs.has_all


def test_the_memory_of_the_ring_has_a_bound_for_any_number_of_members() -> None:
    read_bytes = 1 << 20
    slots = [slots_for(number, read_bytes=read_bytes) for number in range(1, 80)]
    assert all(count * (read_bytes + PAGE) <= MOST_BYTES for count in slots)
    assert all(count % number == 0 for number, count in enumerate(slots, 1))
    assert slots[7] > 0
    assert slots[-1] == 0
