"""A checkpoint that shares a file with the one before is as complete as any other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.store import CheckpointStore, Pending
from checkfreq.testing import CrashingFileOps, commit_bytes
from checkfreq.testing.contract import _safetensors_image, page_aligned
from tests.store import power

ROOT = Path("/chk")
FROZEN, TRAINED = "model.frozen.safetensors", "model.safetensors"
BASE = b"what does not change" * 300


def commit_linked(store: CheckpointStore, step: int, *, frm: int, data: bytes) -> bool:
    """Commit a step that shares the frozen file of an earlier one; returns whether it does."""
    pending = store.begin(step, attempt="test")
    try:
        _, base = _safetensors_image(FROZEN, BASE)
        is_linked = pending.link_payload(store.path(frm) / FROZEN, base)
        entries = [base] if is_linked else [_written(pending, FROZEN, BASE)]
        entries.append(_written(pending, TRAINED, data))
        store.commit(pending, Manifest(step, "test", 1, 0.0, {}, tuple(entries), {}))
    except Exception:
        store.abort(pending)
        raise
    return is_linked


def _written(pending: Pending, name: str, data: bytes) -> FileEntry:
    image, entry = _safetensors_image(name, data)
    payload = pending.create_payload(name, len(image))
    payload.pwrite(memoryview(page_aligned(image)), 0)
    pending.finish_payload(payload, len(image))
    return entry


def with_one_step(store: CheckpointStore) -> CheckpointStore:
    store.open()
    commit_bytes(store, 1, {FROZEN: BASE, TRAINED: b"one"})
    return store


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A directory with step 1."""
    return with_one_step(CheckpointStore(tmp_path / "chk"))


@pytest.mark.parametrize(
    "spoil", [Path.unlink, lambda path: os.truncate(path, 100)], ids=["gone", "cut"]
)
def test_a_file_that_is_not_what_it_was_is_written_again(
    store: CheckpointStore, spoil: Callable[[Path], None]
) -> None:
    spoil(store.path(1) / FROZEN)
    assert not commit_linked(store, 2, frm=1, data=b"two")
    assert store.verify(2).step == 2
    assert (store.path(2) / FROZEN).stat().st_nlink == 1


# Power cuts.


def _histories() -> Iterator[tuple[str, Callable[[CheckpointStore], None], list[set[int]]]]:
    """What is done after step 1, and the sets of steps that it may leave on its way."""

    def link(store: CheckpointStore) -> None:
        assert commit_linked(store, 2, frm=1, data=b"two")

    def link_and_prune(store: CheckpointStore) -> None:
        link(store)
        store.prune([1])

    def link_twice_and_quarantine(store: CheckpointStore) -> None:
        link(store)
        assert commit_linked(store, 3, frm=2, data=b"three")
        store.quarantine(2, "for a test")

    yield "link and prune", link_and_prune, [{1}, {1, 2}, {2}]
    allowed = [{1}, {1, 2}, {1, 2, 3}, {1, 3}]
    yield "link twice and quarantine", link_twice_and_quarantine, allowed


@pytest.mark.parametrize(("name", "act", "allowed"), list(_histories()))
def test_a_power_cut_anywhere_leaves_whole_checkpoints_and_all_that_were_acknowledged(
    name: str, act: Callable[[CheckpointStore], None], allowed: list[set[int]]
) -> None:
    disk = CrashingFileOps()
    with_one_step(CheckpointStore(ROOT, ops=disk))
    for _, finished, left in power.cuts(
        disk, lambda twin: act(CheckpointStore(ROOT, ops=twin)), limit=64
    ):
        store = CheckpointStore(ROOT, ops=left)
        steps = set(store.steps())
        assert steps in ([allowed[-1]] if finished else allowed)
        for step in steps:
            assert store.verify(step).step == step
        store.open()
        assert set(store.steps()) == steps
