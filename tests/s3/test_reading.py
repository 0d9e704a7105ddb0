"""Reading from a real server, also from one that fails, delays and cuts requests."""

from __future__ import annotations

from pathlib import Path

import pytest

import checkfreq
from checkfreq.errors import StorageError
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.reader import MirrorReader
from checkfreq.mirror.settings import Mirror
from checkfreq.restore.restorer import Restorer
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes
from tests.mirror.planting import Planted
from tests.restore.whole import contents
from tests.s3.proxy import Fault, FaultProxy
from tests.s3.server import BUCKET, SECRET, S3Server, running

pytestmark = [pytest.mark.s3, pytest.mark.more]

FILES = {"model.safetensors": bytes(range(256)) * 400, "optimizer.safetensors": b"x" * 10}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path / "written")
    made.open()
    commit_bytes(made, 1, FILES)
    return made


def upload(tmp_path: Path, store: CheckpointStore, mirror: Mirror, step: int) -> None:
    """Put what a mirror holds of a step to the server."""
    planted = Planted(tmp_path / "planted")
    planted.plant(store, step, piece_bytes=4000)
    remote = RemoteObjects(mirror)
    for path in planted.folder.rglob("*"):
        if path.is_file():
            remote.put(str(path.relative_to(planted.folder)), path.read_bytes())


def expect_all(mirror: Mirror, store: CheckpointStore, step: int) -> None:
    source = MirrorReader(mirror, sleep=lambda seconds: None)
    assert source.verify(step) == store.manifest(step)
    done = Restorer(source, shows_progress=False).find(None, contents)
    assert done is not None
    found, files = done
    assert found.step == step
    for name, data in files.items():
        header_bytes = found.manifest.file(name).header_bytes
        assert data == (store.path(step) / name).read_bytes()[header_bytes:]


def test_every_byte_arrives_from_a_server_that_spoils_one_request_in_five(
    s3: S3Server, faulty: FaultProxy, prefix: str, tmp_path: Path, store: CheckpointStore
) -> None:
    upload(tmp_path, store, s3.mirror(prefix), 1)
    expect_all(s3.mirror(prefix, port=faulty.port), store, 1)
    assert {*faulty.seen} == {*Fault} - {Fault.HANG}, "not every fault occurred"


def test_credentials_that_are_not_accepted_are_not_printed(tmp_path: Path) -> None:
    with running(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="1") as server:
        mirror = Mirror(f"s3://{BUCKET}/run", options=server.options())
        with pytest.raises(StorageError, match="access is denied: check the credentials") as caught:
            checkfreq.load(mirror)
    assert SECRET not in str(caught.value)
    assert mirror.url in str(caught.value)
