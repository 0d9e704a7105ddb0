"""Phase two as a manager of one of several ranks sees it, with real workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq.config import CFConfig
from checkfreq.errors import CorruptCheckpointError
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.persist.persistence import Persistence
from checkfreq.policy.lifecycle import AttemptState
from checkfreq.policy.retention import KeepLast
from checkfreq.snapshot.arena import Slot
from checkfreq.types import PAGE_BYTES, Role
from tests.persist.conftest import HandMadeSlot
from tests.persist.group import OLD_STEP, Group, files_of, group_in, own_of, role_of

NODE_LOCAL = Role(0, 2, (0,))

Open = Callable[..., "Rank"]


class Rank:
    """A rank's persistence, its slot filled by hand."""

    def __init__(self, chk_dir: Path, role: Role, config: CFConfig, num_kept: int) -> None:
        self.role = role
        self.on_exit = contextlib.ExitStack()
        self.persistence = Persistence(
            chk_dir,
            config=config,
            retention=KeepLast(num_kept),
            tolerate_failures=0,
            release=lambda slot: None,
            role=role,
        )
        self.persistence.start()
        self.on_exit.callback(self.persistence._client.kill)
        filled = HandMadeSlot(files_of(role.rank))
        self.on_exit.callback(filled.close)
        filled.share(self.persistence._client)
        self.slot = Slot(0, -1, len(filled.memory), filled.memory, 0, PAGE_BYTES)
        self.persistence.open()

    def hand_over(self, step: int, marks: Marks | None = None, *, id: str = "") -> Attempt:
        attempt = Attempt(
            step, self.slot, "periodic", marks or Marks(), time.perf_counter(), id=id or f"a{step}"
        )
        self.persistence._book.add(attempt)
        assert attempt.copied(None)
        objects = {"model": {"kind": "module"}} if self.role.leads else {}
        own = own_of(self.role.rank, self.role.world)
        self.persistence.hand_over(attempt, objects, own)
        return attempt

    def finish(self, attempt: Attempt) -> AttemptState:
        assert self.persistence.wait_until(lambda: attempt.state.ended, timeout_s=120.0)
        return attempt.state

    def save(self, step: int) -> None:
        assert self.finish(self.hand_over(step)) is AttemptState.COMMITTED

    def wait_for_steps(self, *steps: int) -> None:
        persistence = self.persistence
        assert persistence.wait_until(
            lambda: not persistence._client.has_unanswered_requests, timeout_s=120.0
        )
        assert persistence._store.steps() == list(steps)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with group_in(tmp_path / "chk") as group:
        yield group


@pytest.fixture
def open_rank(group: Group) -> Iterator[Open]:
    with contextlib.ExitStack() as on_exit:

        def open_rank(role: Role, *, config: CFConfig | None = None, num_kept: int = 9) -> Rank:
            rank = Rank(group.chk_dir, role, config or CFConfig(), num_kept)
            on_exit.callback(rank.on_exit.close)
            return rank

        yield open_rank


def test_a_member_writes_no_events_marks_or_removals(group: Group, open_rank: Open) -> None:
    leader, member = open_rank(role_of(0, 2)), open_rank(role_of(1, 2), num_kept=1)
    attempt = leader.hand_over(2)
    member.persistence.add_marks(OLD_STEP, Marks(keep=True))
    late = member.hand_over(2, Marks(keep=True))
    member.persistence.add_marks(2, Marks(metrics={"loss": 1.0}))
    for rank, one in ((member, late), (leader, attempt)):
        assert rank.finish(one) is AttemptState.COMMITTED
    member.persistence.confirm(2)
    error = CorruptCheckpointError("x", check="x", expected=1, got=2)
    member.persistence.quarantine(OLD_STEP, error)

    assert not member.persistence._client.has_unanswered_requests
    assert member.persistence.last_event is not None
    assert member.persistence.close(timeout_s=120.0) is None
    group.verify(2)
    assert group.store.marks() == {}
    assert (group.chk_dir / "events.jsonl").read_text().count('"committed"') == 1


def test_a_leader_that_waits_for_parts_is_not_stuck(group: Group, open_rank: Open) -> None:
    patient = CFConfig(persist_timeout_s=0.0, rank_timeout_s=20.0)
    leader, member = open_rank(role_of(0, 2), config=patient), open_rank(role_of(1, 2))
    attempt = leader.hand_over(2)
    for _ in range(5):
        leader.persistence.reap(timeout_s=0.02)
    assert not attempt.state.ended

    member.save(2)

    assert leader.finish(attempt) is AttemptState.COMMITTED
    assert leader.persistence._num_replaced == 0


@pytest.mark.parametrize(
    ("roles", "kept"),
    [([NODE_LOCAL], "retake"), ([role_of(0, 2), role_of(1, 2)], "a2")],
    ids=["a directory for each rank", "one of all"],
)
def test_a_step_that_is_taken_again_replaces_the_one_here_only_if_others_have_theirs(
    roles: list[Role], kept: str, group: Group, open_rank: Open
) -> None:
    ranks = [open_rank(role) for role in roles]
    for name in ("a2", "retake"):
        attempts = [rank.hand_over(2, id=name) for rank in ranks]
        for rank, attempt in zip(ranks, attempts, strict=True):
            assert rank.finish(attempt) is AttemptState.COMMITTED
    assert group.store.verify(2).attempt == kept
    assert ranks[0].persistence._book.last_durable_step == 2
    assert (group.chk_dir / "superseded" / "step-00000002").is_dir() is (kept == "retake")


def test_a_members_failed_snapshot_ends_the_leaders_wait(group: Group, open_rank: Open) -> None:
    leader, member = open_rank(role_of(0, 2)), open_rank(role_of(1, 2))
    void = Attempt(2, member.slot, "periodic", Marks(), time.perf_counter(), id="a2")
    member.persistence._book.add(void)
    assert not void.copied(RuntimeError("the copy broke"))
    member.persistence.reap()
    assert void.state is AttemptState.VOID

    attempt = leader.hand_over(2)

    assert leader.finish(attempt) is AttemptState.FAILED
    assert "rank 1 wrote no part: the snapshot of step 2 failed" in str(attempt.error)
    assert not group.pending


def test_a_step_confirmed_before_the_run_went_back_counts_no_more(
    group: Group, open_rank: Open
) -> None:
    rank = open_rank(NODE_LOCAL, num_kept=1)
    rank.save(5)
    rank.persistence.confirm(5)
    rank.wait_for_steps(5)

    rank.persistence.continue_from(2, attempt="a2", was_chosen=True)
    rank.persistence.confirm(2)
    rank.save(3)
    rank.save(4)

    rank.wait_for_steps(3, 4)
