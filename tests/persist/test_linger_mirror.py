"""Uploads of a worker whose trainer was killed, and of the successor that takes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq.mirror.report import MirrorReport
from checkfreq.mirror.settings import Mirror
from checkfreq.persist import protocol as p
from tests.persist.conftest import HandMadeSlot, request
from tests.persist.lone import (
    LoneWorker,
    Successor,
    eventually,
    opening,
    paused_at,
    taken,
    wait_paused,
)


@pytest.fixture
def settings(tmp_path: Path) -> object:
    (tmp_path / "mirror").mkdir()
    return Mirror((tmp_path / "mirror").as_uri(), wait_on_close_s=600.0).to_json()


def lone(tmp_path: Path, slot: HandMadeSlot, settings: object, faults: str = "") -> LoneWorker:
    """A worker with a mirror."""
    worker = LoneWorker(tmp_path / "chk", faults=faults, mirror=settings)
    worker.share(slot)
    return worker


@pytest.fixture
def worker(tmp_path: Path, slot: HandMadeSlot, settings: object) -> Iterator[LoneWorker]:
    made = lone(tmp_path, slot, settings)
    yield made
    made.close()


def markers(tmp_path: Path) -> list[str]:
    """The checkpoints that are whole in the mirror."""
    return sorted(path.name for path in (tmp_path / "mirror").glob("checkpoints/*.json"))


def commit(successor: Successor, step: int) -> None:
    """Have a checkpoint made, whatever is said of the mirror meanwhile."""
    successor.channel.send(request(step))
    while not isinstance(reply := successor.next_reply(), p.Committed):
        assert isinstance(reply, p.Mirrored), reply


def wait_uploaded(successor: Successor, step: int) -> None:
    """Return once the trainer was told that a step is in the mirror."""
    while True:
        reply = successor.next_reply()
        assert isinstance(reply, p.Mirrored), reply
        if MirrorReport.from_json(reply.report).uploaded_step == step:
            return


def test_it_uploads_after_the_death_and_the_successor_goes_on_uploading(
    worker: LoneWorker, settings: object, tmp_path: Path
) -> None:
    worker.channel.send(request(7))
    while not isinstance(worker.next_reply(), p.Committed):
        pass
    worker.lose_trainer()
    eventually(lambda: markers(tmp_path) == ["step-00000007.json"], "the upload")

    with taken(worker) as successor:
        successor.channel.send(opening(worker.chk_dir)._replace(mirror=settings))
        assert isinstance(successor.next_reply(), p.Opened)
        commit(successor, 9)
        wait_uploaded(successor, 9)


def test_a_successor_cuts_an_upload_which_its_own_resumes(
    slot: HandMadeSlot, settings: object, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    worker = lone(tmp_path, slot, settings, faults=paused_at("mirror.put_manifest", go))
    try:
        worker.channel.send(request(7))
        wait_paused(go)
        worker.lose_trainer()
        with taken(worker) as successor:
            successor.channel.send(opening(worker.chk_dir)._replace(mirror=settings))
            go.touch()
            while not isinstance(reply := successor.next_reply(), p.Opened):
                assert isinstance(reply, p.Mirrored), reply
            wait_uploaded(successor, 7)
    finally:
        worker.close()
