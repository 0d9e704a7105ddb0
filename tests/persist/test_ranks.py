"""Real workers of several ranks in one directory: commits, deaths, replacements, deadlines."""

from __future__ import annotations

import mmap
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq import faults
from checkfreq.errors import PersistError, WorkerDiedError
from checkfreq.persist import protocol as p
from checkfreq.persist.commit import OpenDirectory, task_for
from checkfreq.persist.writer import RateLimiter, SnapshotWriter
from checkfreq.store.joint import JointStore
from tests.persist.conftest import next_reply, request
from tests.persist.group import Group, Rank, group_in, role_of


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with group_in(tmp_path / "chk") as group:
        yield group


def expect_committed(rank: Rank, step: int) -> p.Committed:
    reply = rank.reply()
    assert isinstance(reply, p.Committed), reply
    assert reply.step == step
    assert reply.is_part is not rank.role.leads
    return reply


def expect_failed(rank: Rank, said: str) -> p.Failed:
    reply = rank.reply()
    assert isinstance(reply, p.Failed), reply
    assert said in reply.message
    return reply


def wait_until_killed(rank: Rank) -> None:
    assert rank.client._process is not None
    assert rank.client._process.wait(120.0)
    assert rank.client._process.exit_code == -signal.SIGKILL


# All goes well.


@pytest.mark.parametrize(("world", "is_tree"), [(2, False), (3, True)], ids=["merged", "tree"])
def test_every_rank_writes_its_part_and_the_leader_commits_them_as_one(
    world: int, is_tree: bool, group: Group
) -> None:
    group.is_tree = is_tree
    ranks = group.start(world)
    for rank in reversed(ranks):
        rank.submit(3)
    for rank in ranks:
        reply = expect_committed(rank, 3)
        assert reply.num_bytes == sum(map(len, rank.images.values()))
    group.verify(3)
    for rank in ranks:
        for name, image in rank.images.items():
            assert (group.store.path(3) / name).read_bytes() == image
    assert not group.pending


def test_a_commit_passes_its_fault_points_in_order(
    group: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "points"
    passed = []
    monkeypatch.setenv("CHECKFREQ_FAULT_LOG", str(log))
    leader, member = group.start(2)
    for rank in (member, leader):
        rank.submit(2)
        expect_committed(rank, 2)
        passed.append(list(dict.fromkeys(log.read_text().split())))
        log.unlink()
    assert [sorted(points, key=faults.POINTS.index) for points in passed] == passed
    of_ranks = {point for point in faults.POINTS if point.startswith(("parts.", "commit."))}
    assert of_ranks <= {point for points in passed for point in points}


def test_a_member_refuses_to_change_the_set(group: Group) -> None:
    _, member = group.start(2)
    for asked in (p.Prune((1,)), p.AddMark(1, keep=True, metrics={}), p.Quarantine(1, "bad")):
        member.client.ask(asked)
        reply = next_reply(member.client)
        assert isinstance(reply, p.Trouble)
        assert "rank 0 leads, not rank 1" in reply.message
    group.verify()
    assert not group.store.marks()


# Parts that do not come, or do not fit.


def test_a_member_killed_before_its_part_is_there_costs_the_attempt(group: Group) -> None:
    leader, healthy, victim = group.start(3, scripts={2: "parts.rename:kill-self"})
    for rank in (victim, healthy):
        rank.submit(2)
    expect_committed(healthy, 2)
    wait_until_killed(victim)
    leader.submit(2, part_timeout_s=0.2)
    expect_failed(leader, "rank(s) 2 wrote no part within 0.2 s")
    group.verify()
    assert not group.pending
    with pytest.raises(WorkerDiedError, match="while it held step 2"):
        victim.reply()
    victim.client.forget("attempt2")
    victim.client.replace()
    for rank in (leader, healthy, victim):
        rank.submit(3)
    for rank in (leader, healthy, victim):
        expect_committed(rank, 3)
    group.verify(3)


# Replacements.


@pytest.mark.parametrize(
    ("point", "is_tree"),
    [("parts.merge", True), ("commit.rename", False), ("commit.sync_parent", True)],
)
def test_a_leader_killed_at_the_point_is_replaced_and_finishes_with_the_parts_that_are_there(
    point: str, is_tree: bool, group: Group
) -> None:
    group.is_tree = is_tree
    leader, *members = group.start(3, scripts={0: f"{point}:kill-self"})
    for member in members:
        member.submit(2)
        expect_committed(member, 2)
    leader.submit(2)
    wait_until_killed(leader)
    renamed = faults.POINTS.index(point) > faults.POINTS.index("commit.rename")
    group.verify(*([2] if renamed else []))

    leader.client.replace()

    assert expect_committed(leader, 2).kept_existing is renamed
    group.verify(2)
    assert not group.pending


# Trainers that are gone.


def test_a_leader_without_its_trainer_waits_less_long_for_a_lost_rank(tmp_path: Path) -> None:
    store = JointStore(tmp_path)
    writer = SnapshotWriter(num_threads=1, chunk_bytes=1 << 20, limiter=RateLimiter(None))
    site = OpenDirectory(
        role_of(0, 2), store, writer, None, is_orphaned=lambda: True, layouts={0: ()}
    )
    with mmap.mmap(-1, 4096) as memory:
        site.slots[0] = memory
        for step, part_timeout_s, said in ((2, 0.01, "0.01 s"), (3, 60.0, "1 s")):
            attempt = task_for(site, request(step, world=2, part_timeout_s=part_timeout_s))
            with pytest.raises(PersistError, match=rf"rank\(s\) 1 wrote no part within {said} "):
                attempt.run()
