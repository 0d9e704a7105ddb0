"""A run and its mirror on a real server: two runs, a server that is away, damage, credentials."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from checkfreq import CFManager
from checkfreq.errors import StorageError
from checkfreq.mirror.claim import ClaimKeeper
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.reader import MirrorReader
from checkfreq.mirror.settings import Mirror
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.restorer import Restorer
from checkfreq.store.store import CheckpointStore
from tests.contract.runs import Training, config, managed
from tests.notices.conftest import Server, server
from tests.notices.test_clouds import ACTION
from tests.patience import slowness
from tests.s3.conftest import ON_BOTH
from tests.s3.program import (
    DEADLINE_S,
    wait_until_state,
    wait_uploaded,
)
from tests.s3.proxy import Fault, FaultProxy
from tests.s3.server import S3Server, running
from tests.s3.test_command import checkfreq

__all__ = ["server"]

pytestmark = [pytest.mark.s3, pytest.mark.more]


def with_mirror(chk_dir: Path, training: Training, mirror: Mirror, **changes: object) -> CFManager:
    return managed(chk_dir, training.chk, config=config(mirror=mirror), chk_freq=1, **changes)


def test_a_replacement_is_refused_while_the_old_run_is_alive_and_uploads_when_it_has_ended(
    s3: S3Server, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror = s3.mirror(prefix)
    first, second = Training(), Training(seed=1)
    with with_mirror(tmp_path / "first", first, mirror) as one:
        first.steps(one, 1)
        wait_uploaded(one, 1)
        other = with_mirror(tmp_path / "second", second, mirror)
        assert other.restore()
        second.steps(other, 1)
        wait_until_state(other, "refused")
        first.steps(one, 4)
    assert MirrorReader(mirror).steps()[-1] == 5
    assert MirrorReader(mirror).manifest(5) == CheckpointStore(tmp_path / "first").manifest(5)
    with other:
        second.steps(other, 1)
        wait_until_state(other, "idle")
        second.steps(other, 5)
    assert MirrorReader(mirror).manifest(8) == CheckpointStore(tmp_path / "second").manifest(8)
    assert sum("this run has the claim now" in one.getMessage() for one in caplog.records) == 1


class SlowPieces:
    """A plan of a proxy that takes ``seconds`` to pass on what is uploaded."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, method: str, path: str) -> Fault:
        if method == "PUT" and "/objects/" in path:
            threading.Event().wait(self.seconds)
        return Fault.NONE


def test_after_a_spot_notice_the_last_step_is_in_the_mirror_before_the_machine_goes(
    s3: S3Server, prefix: str, tmp_path: Path, server: Server
) -> None:
    """The notice comes during an upload, and the end while the next one would be going on."""
    upload_s = 6.0 * slowness()
    server.answers["PUT /latest/api/token"] = (200, "token")
    training = Training()
    with FaultProxy(s3.port, SlowPieces(upload_s)).listening() as proxy:
        mirror = s3.mirror(prefix, port=proxy.port)
        settings = config(mirror=mirror, notices=("aws",), metadata_url=server.url)
        manager = managed(tmp_path / "chk", training.chk, config=settings, chk_freq=25)
        until_s = time.monotonic() + DEADLINE_S
        with manager:
            ends_at_unix_s = 0.0
            while not manager.stopped:
                assert time.monotonic() < until_s, manager.stats()
                training.steps(manager, 1)
                view = manager.stats()["mirror"]
                if not ends_at_unix_s and view["num_uploaded"] and view["state"] == "uploading":
                    ends_at_unix_s = time.time() + 2.8 * upload_s
                    at = datetime.fromtimestamp(ends_at_unix_s, timezone.utc).isoformat()
                    answer = {"action": "terminate", "time": at}
                    server.answers[ACTION] = (200, json.dumps(answer))
        assert MirrorReader(mirror).steps()[-1] == manager.global_step
        assert time.time() < ends_at_unix_s


class Switch:
    """A plan of a proxy: every request fails while it is off."""

    def __init__(self) -> None:
        self.is_on = True
        self.fault = Fault.FAIL

    def __call__(self, method: str, path: str) -> Fault:
        return Fault.NONE if self.is_on else self.fault


@pytest.fixture
def switched(s3: S3Server) -> Iterator[tuple[FaultProxy, Switch]]:
    switch = Switch()
    with FaultProxy(s3.port, switch).listening() as proxy:
        yield proxy, switch


def test_a_clock_that_is_wrong_is_not_said_to_be_the_credentials(
    switched: tuple[FaultProxy, Switch], s3: S3Server, prefix: str
) -> None:
    proxy, _ = switched
    proxy.refuses = (403, "RequestTimeTooSkewed")
    with pytest.raises(StorageError, match="this machine's clock is wrong"):
        ClaimKeeper(RemoteObjects(s3.mirror(prefix, port=proxy.port)), run="one").take()


def test_a_server_that_takes_uploads_and_returns_no_parts_of_them_is_refused_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path, "rclone") as server:
        mirror, training = server.mirror("run"), Training()
        with with_mirror(tmp_path / "chk", training, mirror) as manager:
            training.steps(manager, 1)
            manager.wait()
            wait_until_state(manager, "failing")
        assert RemoteObjects(mirror).list("") == {}
        done = checkfreq(server, "doctor", mirror.url, cwd=tmp_path)
    assert "the server returns no parts of objects: take another" in caplog.text
    assert "take a server that returns parts of them" in done.stdout
    assert "same_bytes" not in done.stdout


@ON_BOTH
def test_a_bucket_that_is_not_there_is_said_to_be_missing(s3: S3Server) -> None:
    mirror = Mirror("s3://no-such-bucket/run", options=s3.options())
    for call in (
        lambda: ClaimKeeper(RemoteObjects(mirror), run="one").take(),
        lambda: MirrorReader(mirror).steps(),
    ):
        with pytest.raises(StorageError, match="there is no such bucket: create it"):
            call()


def test_a_server_that_goes_away_in_the_middle_of_a_restore_loses_nothing(
    s3: S3Server, switched: tuple[FaultProxy, Switch], prefix: str, tmp_path: Path
) -> None:
    """The directory has an older step, which is not what the run was at."""
    proxy, switch = switched
    training = Training()
    with with_mirror(tmp_path / "chk", training, s3.mirror(prefix)) as manager:
        for step in (1, 2):
            training.steps(manager, 1)
            wait_uploaded(manager, step)
    shutil.rmtree(tmp_path / "chk" / "step-00000002")
    mirror = s3.mirror(prefix, port=proxy.port)
    source = MirrorReader(mirror, sleep=lambda seconds: None)

    def look(found: FoundCheckpoint) -> None:
        if found.remote is not None:
            switch.is_on = False
            found.reader.verify(found.files)

    with pytest.raises(StorageError):
        Restorer(tmp_path / "chk", remote=source, shows_progress=False).find(None, look)
