"""Power cuts anywhere while several ranks commit: the old set, or the old set plus one.

Tries orders in which a leader and a member can act, with a cut before each operation and
after the last, and every subset of the unsynced changes that the disk can have kept (a sample
where there are too many).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq.errors import CorruptCheckpointError
from checkfreq.store import places
from checkfreq.store.joint import JointStore
from checkfreq.testing import CrashingFileOps
from tests.store import power
from tests.store.ranks import Share, commit_jointly, image_of, shares
from tests.store.test_state_machine import BROKEN, skipping

ROOT = Path("/chk")
WORLD = 2

Turn = Callable[[JointStore], object]


class Kind:
    """How the records of the ranks are kept, in the test that runs."""

    is_tree = False


@pytest.fixture(params=["merged", "folders"], autouse=True)
def kind_of_record(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    Kind.is_tree = request.param != "merged"
    monkeypatch.setattr(places, "RANKS_A_FOLDER", 1)  # a tree syncs what it would without, too
    yield
    Kind.is_tree = False


def store_on(disk: CrashingFileOps) -> JointStore:
    return JointStore(ROOT, ops=disk, is_tree=Kind.is_tree)


def disk_with(*steps: int, kind: type[CrashingFileOps] = CrashingFileOps) -> CrashingFileOps:
    ops = kind()
    store = store_on(ops)
    store.open()
    for step in steps:
        commit_jointly(store, step, world=WORLD)
    return ops


def check_disk(disk: CrashingFileOps, *allowed: set[int]) -> None:
    """Assert that one of the allowed sets is there and complete, before and after a restart."""
    store = store_on(disk)
    steps = set(store.steps())
    assert steps in allowed
    for step in steps:
        store.verify(step)
        manifest = store.manifest(step)
        for share in shares(step, world=WORLD):
            assert manifest.ranks[share.rank] == share.own
            for name, tensors in share.files.items():
                assert disk.read_bytes(store.locate(step, name)) == image_of(name, tensors)[0]
    store.open()
    assert set(store.steps()) == steps
    assert not [name for name in disk.listdir(ROOT) if name.startswith((".tmp-", ".trash-"))]


def cuts(
    ops: CrashingFileOps, act: Turn, *, limit: int = 8
) -> Iterator[tuple[bool, CrashingFileOps]]:
    """Every disk that a cut at any operation of ``act`` can leave, and whether ``act`` returned."""
    for left in power.cuts(ops, lambda twin: act(store_on(twin)), limit=limit):
        yield left.finished, left.disk


def turns_of_leader(share: Share) -> list[Turn]:
    return [
        lambda store: store.lead(share.step, attempt=share.attempt),
        lambda store: share.write_payloads(store.lead(share.step, attempt=share.attempt)),
    ]


def turns_of_member(share: Share) -> list[Turn]:
    def payloads(store: JointStore) -> None:
        pending = store.join(share.step, attempt=share.attempt, rank=share.rank)
        assert pending is not None
        share.write_payloads(pending)

    def part(store: JointStore) -> None:
        pending = store.join(share.step, attempt=share.attempt, rank=share.rank)
        assert pending is not None
        store.write_part(pending, share.manifest())

    def join(store: JointStore) -> None:
        store.join(share.step, attempt=share.attempt, rank=share.rank)

    return [join, payloads, part]


def commit(store: JointStore, share: Share, *, after: int | None = None) -> None:
    pending = store.lead(share.step, attempt=share.attempt)
    store.wait_for_parts(pending, [1], timeout_s=0.0)
    merged = store.merge_parts(pending, share.manifest(), [1])
    store.commit(pending, merged, supersede_after=after)


#: Who is next: the leader's two turns and the member's three, each first and in turn.
ORDERS = ("LLMMM", "MMMLL", "MLMLM")


def in_order(order: str, step: int, *, after: int | None = None) -> Turn:
    def act(store: JointStore) -> None:
        leader, member = shares(step, world=WORLD)
        turns = {"L": iter(turns_of_leader(leader)), "M": iter(turns_of_member(member))}
        for who in order:
            next(turns[who])(store)
        commit(store, leader, after=after)

    return act


@pytest.mark.parametrize("order", ORDERS)
def test_power_cut_anywhere_in_a_joint_commit_leaves_the_old_set_or_one_more(
    order: str,
) -> None:
    num_disks = 0
    for finished, disk in cuts(disk_with(1, 2), in_order(order, 3), limit=8):
        num_disks += 1
        check_disk(disk, {1, 2, 3}, *([] if finished else [{1, 2}]))
    assert num_disks > 50


def test_power_cut_anywhere_in_a_superseding_joint_commit_never_mixes_new_and_later() -> None:
    allowed = [{1, 3, 4}, {1, 3}, {1, 4}, {1}]
    for finished, disk in cuts(disk_with(1, 3, 4), in_order("LMMLM", 2, after=1)):
        check_disk(disk, {1, 2}, *([] if finished else allowed))


def test_power_cut_anywhere_while_a_leader_gives_up_and_goes_on_leaves_whole_sets() -> None:
    """A late member creates the directory again; the next attempt removes it."""

    def act(store: JointStore) -> None:
        leader, member = shares(2, world=WORLD)
        store.abort(store.lead(leader.step, attempt=leader.attempt))
        for turn in turns_of_member(member):
            turn(store)
        in_order("MLMLM", 3)(store)

    for finished, disk in cuts(disk_with(1), act):
        check_disk(disk, {1, 3}, *([] if finished else [{1}]))


def test_power_cut_anywhere_while_a_leader_takes_over_leaves_the_old_set_or_one_more() -> None:
    leader, member = shares(2, world=WORLD)

    def killed(num_calls: int) -> CrashingFileOps:
        """End the leader's worker that many operations after all parts were there."""
        ops = disk_with(1)
        store = store_on(ops)
        for turn in [*turns_of_leader(leader), *turns_of_member(member)]:
            turn(store)
        ops.fail_after(num_calls, OSError("killed here"))
        with pytest.raises(OSError, match="killed here"):
            commit(store, leader)
        return ops

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
    for num_calls in (*range(5), *range(6, 11)) if Kind.is_tree else range(6):
        for finished, disk in cuts(killed(num_calls), take_over):
            check_disk(disk, {1, 2}, *([] if finished else [{1}]))


OF_MEMBERS = skipping("datasync", lambda path: "rank-00001" in path.name)


@pytest.mark.parametrize("kind", [*BROKEN.values(), OF_MEMBERS], ids=[*BROKEN, "a member's"])
def test_leaving_out_any_one_sync_of_a_joint_commit_is_found(kind: type[CrashingFileOps]) -> None:
    def check_all() -> None:
        for disk in disk_with(1, kind=kind).survivors(limit=2000):
            check_disk(disk, {1})

    with pytest.raises((AssertionError, CorruptCheckpointError)):
        check_all()
