"""The store's behaviours on disks that work, fail, or hold damaged checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from checkfreq.errors import (
    ConfigError,
    CorruptCheckpointError,
    ForeignEntryError,
    NoCheckpointError,
    PersistError,
)
from checkfreq.store.fileops import Kind, LocalFileOps, ReadFile
from checkfreq.store.manifest import STATE_BYTES, FileEntry, Manifest, digest_of
from checkfreq.store.marks import StepMark, mark_line
from checkfreq.store.source import CheckpointSource, newest_valid
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import CrashingFileOps, commit_bytes

MEMORY = Path("/chk")


@pytest.fixture
def memory(disk: CrashingFileOps) -> CheckpointStore:
    store = CheckpointStore(MEMORY, ops=disk)
    store.open()
    return store


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "chk")
    store.open()
    return store


def commit(store: CheckpointStore, *steps: int, after: int | None = None) -> None:
    for step in steps:
        files = {"a.safetensors": b"%d" % step * 3, "b.safetensors": b""}
        commit_bytes(store, step, files, attempt=f"a{step}", supersede_after=after)


def damage(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def inject(code: int) -> OSError:
    return OSError(code, os.strerror(code))


# Committing.


def test_a_committed_step_is_listed_and_verifies(store: CheckpointStore) -> None:
    commit(store, 3, 12, 123_456_789)
    for name in ("1", "000000001", "00000001x", "0000000\u0661"):
        (store.root / f"step-{name}").mkdir()
    assert store.steps() == [3, 12, 123_456_789]
    assert store.verify(12).step == 12
    assert sorted(os.listdir(store.path(3))) == ["a.safetensors", "b.safetensors", "manifest.json"]
    assert (store.root / "latest").read_text() == "step-123456789\n"


def test_open_makes_missing_parents_durable_also_where_another_rank_is_faster() -> None:
    class Slow(CrashingFileOps):
        def mkdir(self, path: Path, *, parents: bool = False) -> None:
            super().mkdir(path, parents=parents)
            super().mkdir(path, parents=parents)  # the other rank's came first

    for disk in (CrashingFileOps(), Slow()):
        CheckpointStore(Path("/a/b/c"), ops=disk).open()
        assert all(left.is_dir(Path("/a/b/c")) for left in disk.survivors())


def test_a_parent_need_not_be_synced(disk: CrashingFileOps, memory: CheckpointStore) -> None:
    disk.fail_after(0, inject(errno.EACCES))
    memory.open()
    assert memory.steps() == []


def test_open_where_a_file_is_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "chk").write_bytes(b"")
    with pytest.raises(FileExistsError):
        CheckpointStore(tmp_path / "chk").open()


def test_a_step_that_is_not_to_be_kept_is_set_aside(store: CheckpointStore) -> None:
    for name in ("first", "second", "third"):
        pending = store.begin(1, attempt=name)
        manifest = Manifest(1, name, 1, 0.0, {}, (), {})
        assert not store.commit(pending, manifest, keep_existing=False).kept_existing
    assert store.verify(1).attempt == "third"
    assert len(os.listdir(store.root / "superseded")) == 2


def test_keeping_a_step_acknowledges_it_only_when_its_name_is_durable(
    disk: CrashingFileOps, memory: CheckpointStore
) -> None:
    disk.fail_after(9, inject(errno.EIO))  # the sync of the parent
    with pytest.raises(OSError, match="Input/output"):
        commit_bytes(memory, 1, {"m": b"x"})
    assert memory.steps() == [1]
    assert any(not CheckpointStore(MEMORY, ops=one).steps() for one in disk.survivors())
    assert commit_bytes(memory, 1, {"m": b"x"}).kept_existing
    assert all(CheckpointStore(MEMORY, ops=one).steps() == [1] for one in disk.survivors())


def test_damaged_steps_are_quarantined_each_with_its_reason(store: CheckpointStore) -> None:
    for data in (b"first", b"second", b"third"):
        assert not commit_bytes(store, 1, {"m": data}).kept_existing
        store.verify(1)
        damage(store.path(1) / "m")
    store.quarantine(1, "by hand \ud800")
    names = [f"step-00000001{number}" for number in ("", ".1", ".2")]
    folder = store.root / "quarantine"
    assert sorted(os.listdir(folder)) == sorted([*names, *(f"{n}.reason.txt" for n in names)])
    assert (folder / "step-00000001.2.reason.txt").read_text() == "by hand \\ud800\n"
    assert store.ever_held()
    with pytest.raises(CorruptCheckpointError, match="only quarantined ones"):
        store.newest_valid(check=store.verify)


def test_a_manifest_that_does_not_describe_the_files_is_refused(store: CheckpointStore) -> None:
    commit_bytes(store, 1, {"m": b"payload"})
    record = store.manifest(1)
    pending = store.begin(2, attempt="other")
    file = pending.create_payload("m", 3)
    file.pwrite(memoryview(b"abc"), 0)
    pending.finish_payload(file, 3)
    with pytest.raises(PersistError, match="of step 1, attempt test; m has 3 bytes"):
        store.commit(pending, record)
    store.abort(pending)
    assert store.steps() == [1]


def test_abort_leaves_what_it_cannot_remove_for_the_next_start(
    disk: CrashingFileOps, memory: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    pending = memory.begin(1, attempt="a")
    pending.create_payload("m", 10)
    disk.fail_after(0, inject(errno.EROFS))
    memory.abort(pending)
    assert "left until the next start" in caplog.text
    assert disk.listdir(MEMORY) == [".tmp-1-a"]
    memory.open()
    memory.abort(pending)
    assert disk.listdir(MEMORY) == []


@pytest.mark.parametrize("after", [None, 1])
def test_a_failure_at_any_operation_of_a_commit_leaves_the_old_set(after: int | None) -> None:
    failures = 0
    for num_calls in range(100):
        disk = CrashingFileOps()
        store = CheckpointStore(MEMORY, ops=disk)
        store.open()
        commit(store, 1, 3, 4)
        disk.fail_after(num_calls, inject(errno.EIO))
        try:
            commit(store, 5, after=after)
        except OSError:
            failures += 1
            assert [name for name in disk.listdir(MEMORY) if name.startswith(".tmp")] == []
            if store.steps()[-1] == 5:  # only its last sync failed: whole, not acknowledged
                assert disk.calls[-1].startswith("rename")
                continue
            assert store.steps() == [1, 3, 4]
            for survivor in disk.survivors():
                assert CheckpointStore(MEMORY, ops=survivor).steps() == [1, 3, 4]
            commit(store, 5, after=after)
        assert store.verify(5)
        if disk.calls[-1] == "replace /chk/latest" and num_calls > 40:
            break
    assert failures > 10


def test_a_supersession_that_cannot_be_undone_says_so(
    disk: CrashingFileOps, memory: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(CrashingFileOps):
        def rename(self, src: Path, dst: Path) -> None:
            if "superseded" not in str(dst):
                raise inject(errno.EROFS)
            super().rename(src, dst)

    commit(memory, 1, 2)
    broken = Broken()
    broken.__dict__.update(disk.__dict__)
    with pytest.raises(OSError, match="Read-only"):
        commit(CheckpointStore(MEMORY, ops=broken), 2, after=1)
    assert "may have stayed in superseded" in caplog.text
    assert disk.listdir(MEMORY / "superseded") == ["step-00000002"]


@pytest.mark.parametrize("how", ["superseded", "quarantined"])
def test_marks_of_a_step_set_aside_do_not_pass_on(how: str, store: CheckpointStore) -> None:
    commit(store, 1, 2)
    for step in (1, 2):
        store.add_mark(step, keep=True, metrics={"loss": 1.5})
    if how == "quarantined":
        store.quarantine(2, "damaged")
    commit(store, 2, after=1)
    assert store.marks() == {1: StepMark(True, {"loss": 1.5}), 2: StepMark()}


# Listing and reading.


def test_a_missing_directory_has_no_steps_and_never_held_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "missing")
    assert store.steps() == []
    assert store.marks() == {}
    assert not store.ever_held()
    with pytest.raises(NoCheckpointError):
        store.newest_valid(check=store.verify)
    assert not (tmp_path / "missing").exists()


def test_a_large_file_is_verified_piece_by_piece(store: CheckpointStore) -> None:
    data = os.urandom((4 << 20) + 12_345)
    commit_bytes(store, 1, {"m": data})
    store.verify(1)
    damage(store.path(1) / "m")
    with pytest.raises(CorruptCheckpointError, match="digest of tensor 'data'"):
        store.verify(1)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize(
    ("name", "spoil"),
    [("a.safetensors", cut), ("b.safetensors", grow), ("manifest.json", Path.unlink)],
)
def test_a_file_that_is_gone_or_of_another_length_is_corruption(
    name: str, spoil: Callable[[Path], None], store: CheckpointStore
) -> None:
    commit(store, 1, 2)
    spoil(store.path(2) / name)
    for look in (store.inspect, store.verify):
        with pytest.raises(CorruptCheckpointError, match=name):
            look(2)
        assert store.newest_valid(check=look)[0].step == 1
    spoil(store.path(1) / name)
    with pytest.raises(CorruptCheckpointError, match=rf"step 2: .*{name}.*; step 1: .*{name}"):
        store.newest_valid(check=store.verify)


@pytest.mark.parametrize("name", ["manifest.json", "a.safetensors"])
def test_a_fifo_in_the_place_of_a_committed_file_is_corruption(
    name: str, store: CheckpointStore
) -> None:
    commit(store, 2)
    (store.path(2) / name).unlink()
    os.mkfifo(store.path(2) / name)
    for look in (store.inspect, store.verify):
        with pytest.raises(CorruptCheckpointError, match="a regular file, got a FIFO"):
            look(2)


def test_a_file_that_ends_while_it_is_verified_is_corruption(store: CheckpointStore) -> None:
    class Shrinking(LocalFileOps):
        def open_for_read(self, path: Path) -> ReadFile:
            file = super().open_for_read(path)
            os.truncate(path, 10)
            return file

    commit(store, 1)
    with pytest.raises(CorruptCheckpointError, match="header digest"):
        CheckpointStore(store.root, ops=Shrinking(store.root)).verify(1)


# Records that are too large.


def write_large(store: CheckpointStore, *, state_bytes: int, header: bytes) -> None:
    """A step of no tensors, with so much other state, and a file with such a header."""
    image = len(header).to_bytes(8, "little") + header
    entry = FileEntry("m.safetensors", len(image), len(image), digest_of(image), ())
    pending = store.begin(1, attempt="test")
    file = pending.create_payload(entry.name, len(image))
    file.pwrite(memoryview(image), 0)
    pending.finish_payload(file, len(image))
    objects = {"notes": {"kind": "dict", "tree": "a" * state_bytes}}
    manifest = Manifest(1, "test", 1, 0.0, {}, (entry,), objects)
    try:
        store.commit(pending, manifest)
    except PersistError:
        store.abort(pending)
        raise


def test_a_record_larger_than_its_state_may_be_is_not_written(store: CheckpointStore) -> None:
    with pytest.raises(PersistError, match=r"manifest .* bytes long.*Keep long lists"):
        # Blanks add nothing, and a MiB of payload 1 KiB for digests.
        write_large(store, state_bytes=STATE_BYTES + 1024, header=b"{}" + b" " * (1 << 20))
    assert store.steps() == []


def test_a_record_may_be_as_large_as_its_tensors_headers_make_it(store: CheckpointStore) -> None:
    write_large(store, state_bytes=STATE_BYTES, header=b"n" * (5 << 20))
    assert store.manifest(1).objects["notes"]["tree"] == "a" * STATE_BYTES


def test_a_record_larger_than_can_be_is_corruption_and_not_read(store: CheckpointStore) -> None:
    commit(store, 1)
    path = store.path(1) / "manifest.json"
    os.truncate(path, 1 << 40)
    for claimed in (2, (1 << 64) - 1):
        with (store.path(1) / "x.safetensors").open("wb") as file:
            file.write(claimed.to_bytes(8, "little"))
            file.truncate(1 << 20)
        with pytest.raises(CorruptCheckpointError, match="size in bytes: expected at most"):
            store.manifest(1)


# Walking back.


@pytest.mark.parametrize(
    ("failures", "outcome", "pauses"),
    [
        ({3: 1}, 3, 1),  # for a moment
        ({3: 99}, 2, 2),
        ({3: 99, 2: 99}, 1, 2),  # what is older is not tried again
        ({3: 99, 2: 99, 1: 99}, None, 2),
    ],
)
def test_newest_valid_walks_past_steps_that_cannot_be_read(
    store: CheckpointStore, failures: dict[int, int], outcome: int | None, pauses: int
) -> None:
    commit(store, 1, 2, 3)
    slept: list[float] = []

    def check(source: CheckpointSource, step: int) -> int:
        failures[step] = failures.get(step, 0) - 1
        if failures[step] >= 0:
            raise OSError(errno.EIO, f"reading step {step}")
        return step

    if outcome is None:
        with pytest.raises(OSError, match="reading step 3"):
            newest_valid((store,), check=check, sleep=slept.append)
    else:
        found, rejected = newest_valid((store,), check=check, sleep=slept.append)
        assert (found, [one.step for one in rejected]) == (outcome, [*range(3, outcome, -1)])
        assert not any(one.is_here for one in rejected)
    assert len(slept) == pauses


def test_a_rejected_step_does_not_keep_the_memory_of_its_reading(store: CheckpointStore) -> None:
    commit(store, 1, 2)
    damage(store.path(2) / "a.safetensors")
    found, (rejected,) = store.newest_valid(check=store.verify)
    assert (found.step, rejected.step) == (1, 2)
    assert rejected.error.__traceback__ is None


@pytest.mark.parametrize(
    "error", [ConfigError("newer"), inject(errno.EACCES), NoCheckpointError("of something else")]
)
def test_other_errors_are_never_walked_past(store: CheckpointStore, error: Exception) -> None:
    def check(step: int) -> Manifest:
        if step == 2:
            raise error
        return store.verify(step)

    commit(store, 1, 2)
    with pytest.raises(type(error)):
        store.newest_valid(check=check)


def test_a_step_that_is_listed_and_never_there_ends_in_an_error() -> None:
    class Haunted(CrashingFileOps):
        def scan(self, path: Path, *, beginning: tuple[str, ...] = ("",)) -> Mapping[str, Kind]:
            return {"step-00000009": Kind.DIRECTORY}

    store = CheckpointStore(MEMORY, ops=Haunted())
    with pytest.raises(CorruptCheckpointError, match=r"step-00000009: directory"):
        store.newest_valid(check=store.verify)


def test_a_step_pruned_while_a_reader_walks_is_not_called_corrupt(store: CheckpointStore) -> None:
    def check(step: int) -> Manifest:
        if step == 2:
            commit(store, 3)
            shutil.rmtree(store.path(2))
        return store.verify(step)

    commit(store, 1, 2)
    found, rejected = store.newest_valid(check=check)
    assert (found.step, rejected) == (3, ())


# Quarantine, prune, marks.


def test_prune_keeps_the_last_valid_one_if_the_others_are_damaged(store: CheckpointStore) -> None:
    commit(store, 1, 2, 3, 4)
    (store.path(4) / "a.safetensors").unlink()
    damage(store.path(3) / "manifest.json")
    assert store.prune([1, 2, 3]) == [1, 3]
    assert store.steps() == [2, 4]


def mark_often(store: CheckpointStore, steps: Iterable[int]) -> int:
    """As many ``add_mark`` with a loss would, without a sync for each; the file's length."""
    path = store.root / "marks.jsonl"
    for step in steps:
        store.ops.append_line(path, mark_line(step, metrics={"loss": 1.0 / step}))
    return store.ops.file_size(path)


def test_marks_of_a_long_run_stay_short_and_those_needed_are_kept(store: CheckpointStore) -> None:
    commit(store, 1001, 1002, 1003, 1004)
    long = mark_often(store, range(1, 1001))
    store.add_mark(1002, keep=True, metrics={"loss": 0.5})
    store.add_mark(1003, finished=True)
    store.prune([1001])
    expected = {1002: StepMark(True, {"loss": 0.5}), 1003: StepMark(finished=True)}
    assert store.marks() == expected
    short = mark_often(store, [7] * 100)  # not written anew at each prune
    assert short < long / 5
    store.prune([1004])
    assert mark_often(store, []) == short


def test_a_prune_reports_removed_steps_even_if_the_marks_cannot_be_shortened(
    disk: CrashingFileOps, memory: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    commit(memory, 1, 2)
    mark_often(memory, [2] * 400)
    disk.fail_after(6, inject(errno.ENOSPC))  # rename, its sync, and four removals
    assert memory.prune([1]) == [1]
    assert "marks.jsonl is not shortened" in caplog.text
    assert memory.marks() == {2: StepMark(False, {"loss": 0.5})}


# What is not ours, and directories that cannot be renamed.


def test_a_link_named_like_a_step_is_no_checkpoint_and_is_warned_of_once(
    store: CheckpointStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    commit(store, 1, 9)
    os.rename(store.path(9), tmp_path / "elsewhere")
    store.path(9).symlink_to(tmp_path / "elsewhere")
    assert (store.steps(), store.links()) == ([1], [9])
    for _ in range(2):
        assert store.newest_valid(check=store.verify)[0].step == 1
    assert caplog.text.count("is a symbolic link, not a checkpoint") == 1
    store.require(1)
    with pytest.raises(NoCheckpointError, match="no step 9 .step-00000009 is a symbolic link"):
        store.require(9)
    with pytest.raises(CorruptCheckpointError, match="got a symbolic link"):
        store.manifest(9)
    assert store.prune([9]) == []
    assert sorted(os.listdir(tmp_path / "elsewhere"))[-1] == "manifest.json"
    shutil.rmtree(store.path(1))
    with pytest.raises(CorruptCheckpointError, match="step-00000009 is a symbolic link"):
        store.newest_valid(check=store.verify)  # no first run


def test_a_folder_that_is_a_link_is_not_written_to(store: CheckpointStore, tmp_path: Path) -> None:
    commit(store, 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "step-00000004").mkdir()
    (store.root / "quarantine").symlink_to(tmp_path / "elsewhere")
    (store.root / "superseded").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForeignEntryError, match="quarantine"):
        store.quarantine(1, "bad")
    assert store.steps() == [1]
    assert os.listdir(tmp_path / "elsewhere") == ["step-00000004"]
    assert not store.holds_superseded()
    store.prune([])
    assert store.ever_held()


def test_open_removes_a_link_but_not_its_target(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis").write_bytes(b"x")
    for name in (".tmp-1-a", ".trash-1", ".gone-7"):
        (store.root / name).symlink_to(tmp_path / "precious")
    store.open()
    assert os.listdir(store.root) == []
    assert os.listdir(tmp_path / "precious") == ["thesis"]


def test_marks_that_are_a_fifo_are_an_error_at_once(store: CheckpointStore) -> None:
    os.mkfifo(store.root / "marks.jsonl")
    with pytest.raises(ForeignEntryError, match=r"marks\.jsonl"):
        store.marks()
    commit(store, 1)  # a convenience: the checkpoint is durable without
    assert store.verify(1).step == 1


@pytest.mark.parametrize("then", ["open", "commit"])
def test_a_removal_without_a_rename_that_failed_is_finished_by_the_next_open_or_commit(
    then: str, disk: CrashingFileOps, memory: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    commit(memory, 1, 2)
    disk.fail_after(0, inject(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):  # no reason to go without a rename
        memory.prune([1])
    assert memory.steps() == [1, 2]
    disk.fix(memory.path(1))
    disk.fail_after(3, inject(errno.EIO))  # rename, tombstone, its sync, then a file of it
    with pytest.raises(OSError, match="Input/output"):
        memory.prune([1])
    assert memory.steps() == [2]
    assert disk.exists(memory.path(1))
    if then == "commit":
        commit(memory, 1)
        assert memory.steps() == [1, 2]
        assert memory.verify(1).step == 1
        return
    disk.fail_after(1, inject(errno.EIO))
    memory.open()
    assert "what is left of step 1 stays for now" in caplog.text
    memory.open()
    assert not disk.exists(memory.path(1))
    assert ".gone-1" not in disk.listdir(MEMORY)
