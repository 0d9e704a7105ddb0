"""Several ranks in one directory: parts, waiting, failures, and workers that are replaced."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from checkfreq.errors import PersistError
from checkfreq.store.joint import JointStore
from checkfreq.testing import CrashingFileOps
from tests.store.ranks import (
    Share,
    all_write,
    commit_jointly,
    expect_whole,
    leader_begins,
    leader_commits,
    member_begins,
    shares,
    write_part,
)

ROOT = Path("/chk")


@pytest.fixture(params=[False, True], ids=["merged", "tree"])
def is_tree(request: pytest.FixtureRequest) -> bool:
    """Whether the ranks' records stay files of their own."""
    return bool(request.param)


@pytest.fixture
def store(disk: CrashingFileOps, is_tree: bool) -> JointStore:
    store = JointStore(ROOT, ops=disk, is_tree=is_tree)
    store.open()
    return store


def pending_names(disk: CrashingFileOps) -> list[str]:
    return [name for name in disk.listdir(ROOT) if name.startswith(".tmp-")]


# The undisturbed way.


def test_a_joint_commit_supersedes_later_steps_and_keeps_one_there_is(store: JointStore) -> None:
    for step in (3, 5):
        commit_jointly(store, step)
    leader, *members = shares(4)
    for member in members:
        write_part(store, member)
    leader_commits(store, leader_begins(store, leader), leader, after=3)
    assert store.steps() == [3, 4]
    again = [Share(**{**vars(share), "attempt": "other"}) for share in shares(4)]
    for member in again[1:]:
        write_part(store, member)
    assert leader_commits(store, leader_begins(store, again[0]), again[0]).kept_existing
    expect_whole(store, 4)


# Waiting.


class FakeTime:
    """A clock that only sleeps advance."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.pauses.append(seconds)


def test_a_missing_part_is_looked_for_with_a_fresh_listing_until_an_error_names_the_ranks(
    store: JointStore, disk: CrashingFileOps
) -> None:
    pending = leader_begins(store, shares(world=4)[0])
    write_part(store, shares(world=4)[2])
    time, look, before = FakeTime(), pending.path / ".look", disk.listdir(pending.path)
    del disk.calls[:]
    with pytest.raises(PersistError, match=r"rank\(s\) 1, 3 wrote no part within 10 s") as caught:
        store.wait_for_parts(pending, [1, 2, 3], timeout_s=10.0, clock=time.clock, sleep=time.sleep)
    assert (caught.value.step, caught.value.phase) == (5, "parts")
    assert time.now_s == pytest.approx(110.0)
    assert (time.pauses[:2], max(time.pauses)) == ([0.002, 0.004], 0.05)
    assert disk.calls[:2] == [f"write_file {look}", f"unlink {look}"]
    assert len(disk.calls) // 2 == sum(pause == 0.05 for pause in time.pauses) + 1
    assert disk.listdir(pending.path) == before


def test_a_part_whose_payload_is_gone_is_refused(store: JointStore, disk: CrashingFileOps) -> None:
    leader, pending = all_write(store)
    disk.unlink(pending.path / "rng.rank-00002.safetensors")
    with pytest.raises(PersistError, match="rank 2's rng.rank-00002.safetensors: expected"):
        leader_commits(store, pending, leader)


# Giving up.


def test_a_member_finds_out_that_the_leader_gave_up(store: JointStore) -> None:
    leader, one, two = shares()
    pending = leader_begins(store, leader)
    writing, late = member_begins(store, one), store.join(5, attempt="a5", rank=2)
    assert late is not None
    store.abort(pending)
    with pytest.raises(FileNotFoundError):
        store.write_part(writing, one.manifest())
    with pytest.raises(FileNotFoundError):
        two.write_payloads(late)
    for given_up, rank in ((writing, 1), (late, 2)):
        store.leave(given_up, rank=rank)


class Watched(CrashingFileOps):
    """A disk that calls a hook while a file is being written."""

    watch: Callable[[], None] | None = None

    def write_file(self, path: Path, data: bytes) -> None:
        super().write_file(path, b"")
        if self.watch is not None:
            self.watch()
        super().write_file(path, data)


def test_a_failure_is_never_read_in_half_and_is_told_also_on_a_full_disk() -> None:
    disk, heard = Watched(), list[str]()
    store = JointStore(ROOT, ops=disk)
    store.open()
    pending = leader_begins(store, shares()[0])

    def look(rank: int = 1) -> None:
        with pytest.raises(PersistError) as caught:
            store.wait_for_parts(pending, [rank], timeout_s=0.0)
        heard.append(str(caught.value))

    def refuse() -> None:
        raise OSError(errno.ENOSPC, "no space left")

    for rank, watch in ((1, look), (2, refuse)):
        disk.watch = watch
        store.tell_failure(5, attempt="a5", rank=rank, why="killed twice")
        disk.watch = None
        look(rank)
    assert "wrote no part within 0 s" in heard[0]
    assert heard[1].endswith("rank 1 wrote no part: killed twice")
    assert "rank 2 wrote no part: it could not say why" in heard[2]


def test_a_failure_told_before_the_leader_begins_is_read_and_leaves_no_files(
    store: JointStore, disk: CrashingFileOps
) -> None:
    store.tell_failure(5, attempt="a5", rank=1, why="disk full")
    pending = leader_begins(store, shares()[0])
    with pytest.raises(PersistError, match="disk full"):
        store.wait_for_parts(pending, [1, 2], timeout_s=10.0)
    store.abort(pending)
    assert not pending_names(disk)


def test_what_a_late_member_leaves_is_gone_after_the_next_attempt_begins(
    store: JointStore, disk: CrashingFileOps
) -> None:
    leader, one, _ = shares()
    store.abort(leader_begins(store, leader))
    write_part(store, one)
    disk.mkdir(ROOT / ".tmp-odd")
    early = shares(8)[1]
    write_part(store, early)
    assert store.join(6, attempt="a6", rank=2) is not None
    store.lead(6, attempt="a6")
    assert pending_names(disk) == [".tmp-6-a6", ".tmp-8-a8", ".tmp-odd"]


def test_what_others_wrote_of_a_step_that_is_taken_again_is_not_touched_by_an_older_attempt(
    store: JointStore, disk: CrashingFileOps
) -> None:
    retaken = shares(attempt="retake")
    for member in retaken[1:]:
        write_part(store, member)
    leader, *members = shares()
    older = leader_begins(store, leader)
    assert pending_names(disk) == [".tmp-5-a5", ".tmp-5-retake"]
    with pytest.raises(PersistError):
        leader_commits(store, older, leader)
    store.abort(older)
    late = member_begins(store, members[0])
    leader_commits(store, leader_begins(store, retaken[0]), retaken[0])
    assert store.verify(5).attempt == "retake"
    with pytest.raises(FileNotFoundError):
        store.write_part(late, members[0].manifest())
    assert not pending_names(disk)


def test_an_attempt_given_up_early_leaves_nothing(store: JointStore, disk: CrashingFileOps) -> None:
    _, one, two = shares()
    write_part(store, one)
    store.give_up(5, attempt="a5")
    assert not pending_names(disk)
    write_part(store, two)
    store.lead(5, attempt="retake")
    assert pending_names(disk) == [".tmp-5-retake"]


def test_nothing_is_removed_of_a_part_that_has_its_final_name(
    store: JointStore, disk: CrashingFileOps, caplog: pytest.LogCaptureFixture
) -> None:
    leader, one, two = shares()
    write_part(store, two)
    writing = member_begins(store, one)
    disk.fail_after(3, OSError(errno.EIO, "the directory cannot be synced"))
    store.write_part(writing, one.manifest())
    assert "could not be synced by a member: [Errno 5] the directory" in caplog.text
    store.leave(writing, rank=1)
    store.tell_failure(5, attempt="a5", rank=1, why="killed twice")
    leader_commits(store, leader_begins(store, leader), leader)
    expect_whole(store, 5)


def test_a_part_whose_rename_reported_an_error_may_be_there_and_is_not_removed(
    store: JointStore, disk: CrashingFileOps
) -> None:
    _, one, _ = shares()
    writing = member_begins(store, one)
    disk.fail_after(2, OSError(errno.EIO, "no answer"))
    with pytest.raises(OSError, match="no answer"):
        store.write_part(writing, one.manifest())
    store.leave(writing, rank=1)
    assert disk.listdir(writing.path) == sorted(one.files)


def test_opening_for_a_replacement_keeps_what_other_ranks_may_be_writing(
    store: JointStore, disk: CrashingFileOps
) -> None:
    for step in (5, 6):
        write_part(store, shares(step)[1])
    for name in (".tmp-odd", ".trash-5"):
        disk.mkdir(ROOT / name)
    JointStore(ROOT, ops=disk).open(keep_pending=True)
    assert disk.listdir(ROOT) == [".tmp-5-a5", ".tmp-6-a6"]
    JointStore(ROOT, ops=disk).open()
    assert disk.listdir(ROOT) == []


# Taking over.


@pytest.mark.parametrize("call", ["sync_dir", "rename"])
def test_a_leader_that_takes_over_late_finds_the_whole_record(
    call: str, store: JointStore, disk: CrashingFileOps, is_tree: bool
) -> None:
    leader, *members = shares()
    for member in members:
        write_part(store, member)
    pending = leader_begins(store, leader)
    point = {"sync_dir": 4, "rename": 5}[call]
    # In a tree after the leader's own record (five operations); there is nothing to unlink.
    disk.fail_after(point + 3 * is_tree, OSError(errno.EIO, "killed here"))
    with pytest.raises(OSError, match="killed here"):
        leader_commits(store, pending, leader)
    again = store.lead(5, attempt="a5")
    record = store.record_left(again)
    assert record is not None
    assert not store.is_committed(5, attempt="a5")
    for member in members:
        assert store.join(5, attempt="a5", rank=member.rank) is None
    store.commit(again, record)
    expect_whole(store, 5)


def test_a_leader_that_takes_over_after_the_rename_finds_its_commit_and_syncs_it(
    store: JointStore, disk: CrashingFileOps
) -> None:
    commit_jointly(store, 5)
    del disk.calls[:]
    assert store.is_committed(5, attempt="a5")
    assert disk.calls == [f"sync_dir {ROOT}"]
    assert not store.is_committed(5, attempt="other")
    assert not store.is_committed(6, attempt="a5")


def test_a_part_there_is_is_never_written_again(store: JointStore, disk: CrashingFileOps) -> None:
    leader, one, two = shares()
    member_begins(store, one)  # and was killed: its payloads are written again
    write_part(store, one)
    path = ROOT / ".tmp-5-a5"
    del disk.calls[:]
    assert store.join(5, attempt="a5", rank=1) is None
    assert disk.calls == [f"sync_dir {path}"]
    write_part(store, two)
    leader_commits(store, leader_begins(store, leader), leader)
    assert store.join(5, attempt="a5", rank=1) is None
    assert not pending_names(disk)


def test_a_member_whose_part_was_taken_at_once_has_not_failed(is_tree: bool) -> None:
    """The leader may commit between the rename of the part and the sync of the directory."""

    class Racing(CrashingFileOps):
        def rename(self, src: Path, dst: Path) -> None:
            super().rename(src, dst)
            if dst.name == "part-00002.json":
                leader_commits(store, pending, leader)

    store = JointStore(ROOT, ops=Racing(), is_tree=is_tree)
    store.open()
    leader, one, two = shares()
    pending = leader_begins(store, leader)
    write_part(store, one)
    write_part(store, two)
    expect_whole(store, 5)


def test_a_full_disk_is_found_before_anything_is_written(store: JointStore) -> None:
    with pytest.raises(OSError, match="needs"):
        store.lead(5, attempt="a5", num_bytes=1 << 50)
    with pytest.raises(OSError, match="needs"):
        store.join(5, attempt="a5", rank=1, num_bytes=1 << 50)


def test_a_common_step_survives_a_power_cut(store: JointStore, disk: CrashingFileOps) -> None:
    assert not store.ever_held_common()
    store.note_common(5)
    for after in disk.survivors():
        assert JointStore(ROOT, ops=after).ever_held_common()
