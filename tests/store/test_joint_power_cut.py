"""Power cuts anywhere while several ranks commit: the old set, or the old set plus one.

Tries orders in which a leader and a member can act, with a cut before each operation and
after the last, and every subset of the unsynced changes that the disk can have kept (a sample
where there are too many).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from checkfreq.errors import CorruptCheckpointError
from checkfreq.store import places
from checkfreq.store.joint import JointStore
from checkfreq.testing import CrashingFileOps
from tests.store import power
from tests.store.ranks import Share, commit_jointly, expect_whole, member_begins, shares
from tests.store.test_power_cut import BROKEN, ROOT, skipping

WORLD = 2

Turn = Callable[[JointStore], object]


class Records:
    """How the records of the ranks are kept, in the test that runs."""

    def __init__(self, *, is_tree: bool) -> None:
        self.is_tree = is_tree

    def on(self, disk: CrashingFileOps) -> JointStore:
        return JointStore(ROOT, ops=disk, is_tree=self.is_tree)

    def disk_with(
        self, *steps: int, kind: type[CrashingFileOps] = CrashingFileOps
    ) -> CrashingFileOps:
        ops = kind()
        self.on(ops).open()
        for step in steps:
            commit_jointly(self.on(ops), step, world=WORLD)
        return ops

    def check(self, disk: CrashingFileOps, *allowed: set[int]) -> None:
        """Assert that one of the allowed sets is there and complete, also after a restart."""
        store = self.on(disk)
        steps = set(store.steps())
        assert steps in allowed
        for step in steps:
            expect_whole(store, step, world=WORLD)
        store.open()
        assert set(store.steps()) == steps
        assert not [name for name in disk.listdir(ROOT) if name.startswith((".tmp-", ".trash-"))]

    def check_cuts(
        self, disk: CrashingFileOps, act: Turn, *, before: list[set[int]], after: set[int]
    ) -> None:
        """Cut at any operation of ``act``, or after it."""
        num_disks = 0
        for left in power.cuts(disk, lambda twin: act(self.on(twin)), limit=8):
            self.check(left.disk, after, *([] if left.finished else before))
            num_disks += 1
        assert num_disks > 5


@pytest.fixture(params=["merged", "folders"])
def records(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Records:
    monkeypatch.setattr(places, "RANKS_A_FOLDER", 1)  # a tree syncs what it would without, too
    return Records(is_tree=request.param == "folders")


def leader_writes(store: JointStore, share: Share) -> None:
    share.write_payloads(store.lead(share.step, attempt=share.attempt))


def member_writes(store: JointStore, share: Share) -> None:
    store.write_part(member_begins(store, share), share.manifest())


def commit(store: JointStore, share: Share, *, after: int | None = None) -> None:
    pending = store.lead(share.step, attempt=share.attempt)
    store.wait_for_parts(pending, [1], timeout_s=0.0)
    merged = store.merge_parts(pending, share.manifest(), [1])
    store.commit(pending, merged, supersede_after=after)


def in_order(order: str, step: int, *, after: int | None = None) -> Turn:
    """The leader and the member write as ``order`` says (in small: what they have written)."""

    def act(store: JointStore) -> None:
        leader, member = shares(step, world=WORLD)
        turns = {"L": leader_writes, "M": member_writes, "m": member_begins}
        for who in order:
            turns[who](store, leader if who == "L" else member)
        commit(store, leader, after=after)

    return act


@pytest.mark.parametrize("order", ["LM", "ML", "mLM"])
def test_a_cut_in_a_commit_leaves_the_old_set_or_one_more(order: str, records: Records) -> None:
    disk = records.disk_with(1, 2)
    records.check_cuts(disk, in_order(order, 3), before=[{1, 2}], after={1, 2, 3})


def test_a_cut_in_a_superseding_commit_never_mixes_new_and_later(records: Records) -> None:
    before = [{1, 3, 4}, {1, 3}, {1, 4}, {1}]
    disk = records.disk_with(1, 3, 4)
    records.check_cuts(disk, in_order("LM", 2, after=1), before=before, after={1, 2})


def test_a_cut_while_a_leader_gives_up_and_goes_on_leaves_whole_sets(records: Records) -> None:
    """A late member creates the directory again; the next attempt removes it."""

    def act(store: JointStore) -> None:
        leader, member = shares(2, world=WORLD)
        store.abort(store.lead(leader.step, attempt=leader.attempt))
        member_writes(store, member)
        in_order("ML", 3)(store)

    records.check_cuts(records.disk_with(1), act, before=[{1}], after={1, 3})


def test_a_cut_while_a_leader_takes_over_leaves_the_old_set_or_one_more(records: Records) -> None:
    leader, member = shares(2, world=WORLD)

    def killed(num_calls: int) -> CrashingFileOps:
        """End the leader's worker that many operations after all parts were there."""
        disk = records.disk_with(1)
        store = records.on(disk)
        leader_writes(store, leader)
        member_writes(store, member)
        disk.fail_after(num_calls, OSError("killed here"))
        with pytest.raises(OSError, match="killed here"):
            commit(store, leader)
        return disk

    def take_over(store: JointStore) -> None:
        store.open(keep_pending=True)
        if store.is_committed(leader.step, attempt=leader.attempt):
            return
        pending = store.lead(leader.step, attempt=leader.attempt)
        record = store.record_left(pending)
        if record is None:
            leader.write_payloads(pending)
            commit(store, leader)
        else:
            store.commit(pending, record)

    # The folder; of the record: write, sync, unlink, sync, rename. Of a tree the leader's own comes
    # before it: unlink, write, sync, rename, and a sync of which a failure is none.
    # With folders the member's is synced before the record's.
    for num_calls in (*range(5), *range(6, 11)) if records.is_tree else range(6):
        records.check_cuts(killed(num_calls), take_over, before=[{1}], after={1, 2})


OF_MEMBERS = skipping("datasync", lambda path: "rank-00001" in path.name)


@pytest.mark.parametrize("kind", [*BROKEN.values(), OF_MEMBERS], ids=[*BROKEN, "a member's"])
def test_leaving_out_any_one_sync_is_found(kind: type[CrashingFileOps], records: Records) -> None:
    def check_all() -> None:
        for disk in records.disk_with(1, kind=kind).survivors(limit=2000):
            records.check(disk, {1})

    with pytest.raises((AssertionError, CorruptCheckpointError)):
        check_all()
