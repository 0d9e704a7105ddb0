"""A run and its mirror on a real server: two runs, a server that is away, damage, credentials."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager, KeepLast
from checkfreq.errors import StorageError
from checkfreq.mirror import layout
from checkfreq.mirror.claim import ClaimKeeper
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import Marker
from checkfreq.mirror.reader import MirrorReader
from checkfreq.mirror.settings import Mirror
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.restorer import Restorer
from checkfreq.store.store import CheckpointStore
from tests.contract.runs import Training, config, managed
from tests.s3.program import DEADLINE_S, wait_uploaded
from tests.s3.proxy import Fault, FaultProxy
from tests.s3.server import SECRET, S3Server, running
from tests.supervisor.supervised import Supervised

pytestmark = [pytest.mark.s3, pytest.mark.more]


def with_mirror(chk_dir: Path, training: Training, mirror: Mirror, **changes: object) -> CFManager:
    return managed(chk_dir, training.chk, config=config(mirror=mirror), chk_freq=1, **changes)


def state_of(manager: CFManager) -> str:
    state: str = manager.stats()["mirror"]["state"]
    return state


def test_a_second_run_on_the_prefix_is_refused_and_uploads_nothing(
    s3: S3Server, prefix: str, tmp_path: Path
) -> None:
    mirror = s3.mirror(prefix)
    first, second = Training(), Training(seed=1)
    with with_mirror(tmp_path / "first", first, mirror) as one:
        first.steps(one, 1)
        wait_uploaded(one, 1)
        with with_mirror(tmp_path / "second", second, mirror, fresh=True) as other:
            second.steps(other, 5)
            is_refused = other._persistence.wait_until(
                lambda: state_of(other) == "refused", timeout_s=DEADLINE_S
            )
            assert is_refused, state_of(other)
        first.steps(one, 1)
        wait_uploaded(one, 2)
    assert MirrorReader(mirror).steps() == [1, 2]
    assert CheckpointStore(tmp_path / "second").steps()[-1] == 5
    assert MirrorReader(mirror).manifest(2) == CheckpointStore(tmp_path / "first").manifest(2)


class Switch:
    """A plan of a proxy: every request fails while it is off."""

    def __init__(self) -> None:
        self.is_on = True

    def __call__(self, method: str, path: str) -> Fault:
        return Fault.NONE if self.is_on else Fault.FAIL


@pytest.fixture
def switched(s3: S3Server) -> Iterator[tuple[FaultProxy, Switch]]:
    switch = Switch()
    with FaultProxy(s3.port, switch).listening() as proxy:
        yield proxy, switch


def test_what_only_the_directory_has_is_not_removed_while_the_server_is_away(
    s3: S3Server, switched: tuple[FaultProxy, Switch], prefix: str, tmp_path: Path
) -> None:
    proxy, switch = switched
    mirror, chk_dir = s3.mirror(prefix, port=proxy.port), tmp_path / "chk"
    training = Training()
    with with_mirror(chk_dir, training, mirror, retention=KeepLast(1)) as manager:
        training.steps(manager, 1)
        wait_uploaded(manager, 1)
        switch.is_on = False
        training.update(manager)
        manager.step()
        manager.save(wait=True, keep=True)
        for _ in range(4):
            training.steps(manager, 1)
            manager.wait()
            held = manager.stats()["mirror"]["held_steps"]
            assert {*held} <= {*CheckpointStore(chk_dir).steps()}
            assert 2 in CheckpointStore(chk_dir).steps()
        switch.is_on = True
        wait_uploaded(manager, 6)
    found = MirrorReader(s3.mirror(prefix))
    assert found.steps()[-1] == 6
    assert found.verify(6) == CheckpointStore(chk_dir).manifest(6)


def test_damage_on_the_server_is_walked_past(s3: S3Server, prefix: str, tmp_path: Path) -> None:
    mirror = s3.mirror(prefix)
    first, training = Training(), Training(seed=1)
    with with_mirror(tmp_path / "old", first, mirror) as manager:
        bits = []
        for step in (1, 2):
            bits += first.steps(manager, 1)
            wait_uploaded(manager, step)
    remote = RemoteObjects(mirror)
    key = layout.marker_key(2)
    marker = Marker.decode(remote.get(key)[0], key=key)
    before = Marker.decode(remote.get(layout.marker_key(1))[0], key=layout.marker_key(1))
    own = sorted(marker.keys() - before.keys() - {marker.manifest.key})[0]
    data = bytearray(remote.get(own)[0])
    data[-1] ^= 1
    remote.put(own, bytes(data))

    with with_mirror(tmp_path / "new", training, mirror) as manager:
        assert manager.restore()
        assert manager.global_step == 1
        assert training.bits() == bits[0]


def test_a_frozen_weight_that_was_damaged_on_its_way_is_sent_again(
    s3: S3Server,
    switched: tuple[FaultProxy, Switch],
    prefix: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy, _ = switched
    num_large: list[str] = []

    def flip_first(method: str, path: str, body: bytes) -> bytes:
        if method != "PUT" or len(body) < 8 << 20:
            return body
        num_large.append(path)
        return body if len(num_large) > 1 else body[:-1] + bytes([body[-1] ^ 1])

    proxy.change = flip_first
    model = nn.ModuleDict({"frozen": nn.Linear(1536, 1536).requires_grad_(False)})
    model["head"] = nn.Linear(2, 2)
    chk = CFCheckpoint(model=model, optimizer=torch.optim.SGD(model["head"].parameters(), lr=0.1))
    mirror = s3.mirror(prefix, port=proxy.port)
    with managed(tmp_path / "chk", chk, config=config(mirror=mirror), chk_freq=99) as manager:
        for step in range(1, 5):
            model["head"](torch.ones(2)).sum().backward()
            manager.weight_update()
            manager.step()
            manager.save(wait=True)
            wait_uploaded(manager, step)
            if step == 2:  # the first that names what the one before sent
                assert manager._persistence.wait_until(
                    lambda: manager.stats()["mirror"]["num_uploaded"] > 2, timeout_s=DEADLINE_S
                )
    assert len(num_large) == 2
    assert "is sent again: objects/" in caplog.text
    source = MirrorReader(s3.mirror(prefix))
    for step in source.steps():
        source.verify(step)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda proxy: proxy.drops.add("range"), "cannot be read back in parts"),
        (
            lambda proxy: setattr(proxy, "refuses", (403, "RequestTimeTooSkewed")),
            "this machine's clock is wrong",
        ),
    ],
)
def test_a_server_that_cannot_be_a_mirror_is_found_at_the_start(
    spoil: Callable[[FaultProxy], None],
    said: str,
    switched: tuple[FaultProxy, Switch],
    s3: S3Server,
    prefix: str,
) -> None:
    proxy, _ = switched
    spoil(proxy)
    with pytest.raises(StorageError, match=said):
        ClaimKeeper(RemoteObjects(s3.mirror(prefix, port=proxy.port)), run="one").take()


RESTORING = """
import torch
from checkfreq import CFCheckpoint, CFConfig, CFManager, Mirror
from checkfreq.errors import StorageError

if __name__ == "__main__":
    model = torch.nn.Linear(2, 2)
    mirror = Mirror({url!r}, options={options!r})
    manager = CFManager(chk_dir, CFCheckpoint(model=model), config=CFConfig(mirror=mirror))
    try:
        manager.restore()
    except StorageError:
        note("away")
        raise
    manager.close()
"""


def test_a_run_that_finds_the_server_away_is_started_again_and_not_counted(
    s3: S3Server, switched: tuple[FaultProxy, Switch], prefix: str, tmp_path: Path
) -> None:
    proxy, switch = switched
    switch.is_on = False
    mirror = s3.mirror(prefix, port=proxy.port)
    program = RESTORING.format(url=mirror.url, options=dict(mirror.options or {}))
    run = Supervised(tmp_path, program, "--max-restarts=0")
    run.wait_for("away")
    switch.is_on = True
    status, said = run.end()
    assert status == 0, run.errors
    assert said[0].startswith("restart 1 after exit status 1 (its checkpoints cannot be reached)")


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


def test_a_bucket_that_is_not_there_is_said_to_be_missing(s3: S3Server) -> None:
    mirror = Mirror("s3://no-such-bucket/run", options=s3.options())
    for call in (
        lambda: ClaimKeeper(RemoteObjects(mirror), run="one").take(),
        lambda: MirrorReader(mirror).steps(),
    ):
        with pytest.raises(StorageError, match="there is no such bucket: create it"):
            call()


def test_a_restore_with_credentials_that_are_not_accepted_says_so_without_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with running(tmp_path, INITIAL_NO_AUTH_ACTION_COUNT="1") as server:
        mirror = server.mirror("run")
        manager = with_mirror(tmp_path / "chk", Training(), mirror)
        with pytest.raises(StorageError, match="access is denied") as caught:
            manager.restore()
        manager.close()
    printed = capfd.readouterr()
    for text in (str(caught.value), caplog.text, printed.out, printed.err, repr(mirror)):
        assert SECRET not in text
