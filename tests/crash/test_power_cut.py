"""The power cut of the acceptance tests is a real one: what was never synced is gone after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq.store.fileops import LocalFileOps, PayloadFile
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes
from tests.acceptance.volumes import VOLUMES, Volume, mounted
from tests.store.power import UnsyncedPayload

pytestmark = [pytest.mark.crash, pytest.mark.slow]


@pytest.fixture(params=sorted(VOLUMES))
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Volume]:
    with mounted(request.param, tmp_path) as found:
        yield found


def content_of(step: int) -> bytes:
    return f"state of step {step}".encode() * 500


def commit(store: CheckpointStore, step: int, after: int | None = None) -> None:
    commit_bytes(store, step, {"m": content_of(step)}, attempt=f"a{step}", supersede_after=after)


def test_a_store_that_syncs_nothing_loses_what_it_acknowledged(volume: Volume) -> None:
    class Unsynced(LocalFileOps):
        def sync_file(self, path: Path) -> None:
            pass

        def sync_dir(self, path: Path) -> None:
            pass

        def create_payload(self, path: Path, *, num_bytes: int) -> PayloadFile:
            return UnsyncedPayload(super().create_payload(path, num_bytes=num_bytes))

    root = volume.mount_point / "chk"
    CheckpointStore(root).open()
    store = CheckpointStore(root, ops=Unsynced(root))
    commit(store, 1)
    assert store.steps() == [1]
    volume.cut_power()
    volume.unmount()
    volume.mount()
    assert CheckpointStore(root).steps() == []
