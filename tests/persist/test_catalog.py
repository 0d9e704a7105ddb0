"""Which checkpoints are known, and which removals are requested, over a real directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checkfreq.persist import protocol as p
from checkfreq.persist.attempts import Attempt, Marks
from checkfreq.persist.catalog import Catalog
from checkfreq.persist.commit import SPARE_BYTES
from checkfreq.policy.retention import KeepEvery, KeepLast, Retention
from checkfreq.policy.retention_info import CheckpointInfo
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes

SLOT: Any = "slot 0"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Steps 1 to 3."""
    store = CheckpointStore(tmp_path / "chk")
    store.open()
    for step in (1, 2, 3):
        commit(store, step)
    return store


def commit(store: CheckpointStore, step: int) -> None:
    commit_bytes(store, step, {"model.safetensors": b"data"}, attempt=f"a{step}")


def attempt_of(step: int, *, id: str = "", keep: bool = False) -> Attempt:
    return Attempt(step, SLOT, "periodic", Marks(keep=keep), started_s=1.0, id=id or f"a{step}")


def added(
    catalog: Catalog, attempt: Attempt, *, num_bytes: int = 10, free_bytes: int | None = None
) -> None:
    reply = p.Committed(
        attempt.id,
        attempt.step,
        num_bytes,
        write_s=0.1,
        persist_s=0.1,
        ended_s=1.0,
        direct=True,
        kept_existing=False,
        total_bytes=num_bytes,
        free_bytes=free_bytes,
    )
    catalog.add(attempt, reply)


def catalog_of(store: CheckpointStore, *, num_kept: int = 1, is_shared: bool = True) -> Catalog:
    catalog = Catalog(store, KeepLast(num_kept), is_shared=is_shared)
    catalog.load(store.manifest)
    return catalog


def test_removals_are_requested_once_until_they_are_answered(store: CheckpointStore) -> None:
    catalog = catalog_of(store)
    assert catalog.request_removals() == (1, 2)
    added(catalog, attempt_of(4))
    assert catalog.request_removals() == (3,)
    assert catalog.request_removals() == ()
    catalog.removals_answered((1, 2))
    catalog.removals_answered()  # that one failed: it may be requested again
    assert catalog.request_removals() == (3,)


def test_of_several_directories_each_removes_only_what_is_confirmed(store: CheckpointStore) -> None:
    catalog = catalog_of(store, is_shared=False)
    assert catalog.request_removals() == ()
    assert catalog.confirm(2)
    assert not catalog.confirm(2)
    assert catalog.request_removals() == (1,)


def test_pins_on_disk_and_those_added_later_keep_a_step(store: CheckpointStore) -> None:
    store.add_mark(1, keep=True)
    catalog = catalog_of(store)
    catalog.add_marks(2, Marks(keep=True))
    added(catalog, attempt_of(4, keep=True))
    added(catalog, attempt_of(5))
    assert catalog.request_removals() == (3,)


def test_a_failed_attempt_is_known_only_if_its_step_was_left(store: CheckpointStore) -> None:
    catalog = catalog_of(store)
    commit(store, 4)
    catalog.add_if_left(attempt_of(4, id="another"))
    assert catalog.remove_missing(store.steps()) == []
    assert catalog.request_removals() == (1, 2)
    catalog.add_if_left(attempt_of(4))
    assert catalog.request_removals() == (3,)


def test_steps_that_are_set_aside_or_missing_are_forgotten(store: CheckpointStore) -> None:
    catalog = catalog_of(store)
    catalog.remove(3)
    catalog.remove(7)
    assert catalog.remove_missing([2]) == [1]
    added(catalog, attempt_of(3))
    catalog.remove_later_than(2)
    assert catalog.request_removals() == ()


def disk_bound(store: CheckpointStore, policy: Retention) -> Catalog:
    catalog = Catalog(store, policy.within_disk(), is_shared=True)
    catalog.load(store.manifest)
    return catalog


def test_history_goes_while_the_disk_has_no_room_for_the_next_two(store: CheckpointStore) -> None:
    catalog = disk_bound(store, KeepLast(2) | KeepEvery(steps=1))
    size = store.manifest(1).num_bytes
    room = 2 * (size + SPARE_BYTES)
    added(catalog, attempt_of(4), num_bytes=size, free_bytes=room)
    assert catalog.request_removals() == ()
    added(catalog, attempt_of(5), num_bytes=size, free_bytes=room - 1)
    assert catalog.request_removals() == (1,)
    # What was requested counts as free: the worker is not done with it yet.
    added(catalog, attempt_of(6), num_bytes=size, free_bytes=room - size)
    assert catalog.request_removals() == ()
    catalog.removals_answered((1,))
    added(catalog, attempt_of(7), num_bytes=size, free_bytes=0)
    assert catalog.request_removals() == (2, 3, 4, 5)  # all history, and nothing else


def test_a_policy_of_the_users_own_is_asked_and_nothing_else(store: CheckpointStore) -> None:
    class OddOnes:
        def to_remove(self, checkpoints: Sequence[CheckpointInfo]) -> list[int]:
            return [c.step for c in checkpoints if c.step % 2 == 0]

    catalog = Catalog(store, OddOnes(), is_shared=True)
    catalog.load(store.manifest)
    added(catalog, attempt_of(5), free_bytes=0)
    assert catalog.request_removals() == (2,)
    assert catalog.make_room(10**6) == ()
