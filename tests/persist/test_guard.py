"""What the worker does when its directory is removed, replaced or unlocked under it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkfreq.persist import protocol as p
from checkfreq.persist.client import WorkerClient
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes
from tests.acceptance.disks import call
from tests.persist.conftest import next_reply, request


@pytest.fixture
def chk_dir(client: WorkerClient, tmp_path: Path) -> Path:
    """The worker's directory, with one checkpoint of it."""
    client.submit(request(3))
    assert isinstance(next_reply(client), p.Committed)
    return tmp_path / "chk"


def expect_retaken(client: WorkerClient, *, step: int, steps: tuple[int, ...]) -> str:
    """Expect a commit, after a message that the worker locked the directory again."""
    client.submit(request(step))
    retaken, committed = next_reply(client), next_reply(client)
    assert isinstance(retaken, p.Retaken)
    assert retaken.steps == steps
    assert isinstance(committed, p.Committed)
    return retaken.message


def expect_refused(client: WorkerClient, *, step: int) -> str:
    client.submit(request(step))
    reply = next_reply(client)
    assert isinstance(reply, p.Failed)
    assert reply.phase == "begin"
    return reply.message


def test_a_deleted_lock_file_is_locked_again(client: WorkerClient, chk_dir: Path) -> None:
    (chk_dir / ".lock").unlink()
    message = expect_retaken(client, step=4, steps=(3,))
    assert "its .lock was removed or replaced" in message
    assert "gone" not in message
    client.submit(request(5))  # nothing is left to report
    assert isinstance(next_reply(client), p.Committed)
    (chk_dir / ".lock").unlink()
    client.ask(p.Prune((3,)))
    assert isinstance(next_reply(client), p.Retaken)
    assert next_reply(client) == p.Done("Prune", (3,))


def test_a_directory_that_replaced_ours_is_used_if_it_has_no_newer_steps(
    client: WorkerClient, chk_dir: Path
) -> None:
    chk_dir.rename(chk_dir.with_name("moved"))
    commit_bytes(_opened(chk_dir), 2, {"m": b"older"})
    message = expect_retaken(client, step=4, steps=(2,))
    assert "it was replaced by another directory" in message
    assert "earlier checkpoints are gone: step(s) 3" in message
    assert CheckpointStore(chk_dir).steps() == [2, 4]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("chk", "on another file system: mount the one that was there"),
        (".", "it was removed while training, and its file system with it"),
    ],
    ids=["its own", "its parent's"],
)
def test_nothing_is_written_while_another_file_system_has_the_directorys_place(
    place: str, why: str, client: WorkerClient, chk_dir: Path, tmp_path: Path
) -> None:
    """An empty file system is mounted over the directory; an unmount looks the same."""
    try:
        call("mount", "-t", "tmpfs", "tmpfs", str(tmp_path / place))
    except OSError as error:
        pytest.skip(f"this machine cannot mount: {error}")
    try:
        assert why in expect_refused(client, step=4)
        assert os.listdir(tmp_path / place) == []
    finally:
        call("umount", str(tmp_path / place))
    client.submit(request(5))
    assert isinstance(next_reply(client), p.Committed)


def _opened(chk_dir: Path) -> CheckpointStore:
    store = CheckpointStore(chk_dir)
    store.open()
    return store
