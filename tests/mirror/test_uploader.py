"""One checkpoint to an object store, and what is sent again."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq.errors import CorruptCheckpointError, NoCheckpointError
from checkfreq.mirror.bandwidth import Bandwidth
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import OBJECTS, piece_of_key
from checkfreq.mirror.uploader import HELD_BYTES, UploadAbandonedError, Uploader
from checkfreq.store.joint import JointStore
from checkfreq.store.manifest import Manifest
from checkfreq.store.store import CheckpointStore
from checkfreq.store.tree import Tree
from tests.mirror.checkpoints import MIB, commit, contents, markers, memory_remote, noise, on_disk
from tests.store.ranks import commit_jointly

MakeUploader = Callable[..., Uploader]
GoOn = Callable[[float | None], None]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "chk")


@pytest.fixture
def remote() -> RemoteObjects:
    return memory_remote()


@pytest.fixture
def make(store: CheckpointStore) -> Iterator[MakeUploader]:
    made = []

    def uploader(remote: RemoteObjects, go_on: GoOn = lambda sending: None) -> Uploader:
        one = Uploader(remote, store, bandwidth=Bandwidth(None), part_bytes=16 * MIB, go_on=go_on)
        made.append(one)
        return one

    yield uploader
    for one in made:
        one.close()


def two_files() -> dict[str, dict[str, bytes]]:
    return {
        "model.safetensors": {"frozen": noise(9 * MIB), "head": noise(1000), "empty": b""},
        "optimizer.safetensors": {"m": noise(MIB), "v": noise(12 * MIB)},
    }


def test_of_many_ranks_records_the_mirror_keeps_one(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    joint = JointStore(store.root, is_tree=True)
    joint.open()
    commit_jointly(joint, 7, world=3)
    assert isinstance(store.head(7), Tree)
    done = make(remote).upload(7)
    assert set(done.marker.files) == {file.name for file in store.manifest(7).files}
    data, _ = remote.get(done.marker.manifest.key)
    assert Manifest.decode(data, path="m") == store.manifest(7)
    files = {name: data for name, data in on_disk(store, 7).items() if name in done.marker.files}
    found = contents(remote, done.marker)
    assert found.pop("manifest.json") == data
    assert found == files


def test_the_objects_of_a_marker_are_the_files_byte_for_byte(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    commit(store, 7, two_files())
    done = make(remote).upload(7, at_epoch_end=True)
    assert contents(remote, done.marker) == on_disk(store, 7)
    assert markers(remote) == {7: done.marker}
    assert done.marker.at_epoch_end
    assert done.sent_bytes == done.marker.num_bytes


def test_what_has_not_changed_is_sent_once(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    files = two_files()
    commit(store, 1, files)
    uploader = make(remote)
    uploader.upload(1)
    files["model.safetensors"]["head"] = noise(1000)
    commit(store, 2, files)
    done = uploader.upload(2)
    assert done.sent_bytes < 10_000
    assert contents(remote, done.marker) == on_disk(store, 2)


def test_what_twenty_uploads_share_is_sent_anew(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    uploader, frozen, sent = make(remote), noise(MIB), []
    for step in range(1, 24):
        commit(store, step, {"m.safetensors": {"frozen": frozen, "w": noise(100)}})
        sent.append(uploader.upload(step).sent_bytes)
    assert [step for step, num_bytes in enumerate(sent, 1) if num_bytes >= MIB] == [
        *(1, 2, 23)  # the second in a piece of its own
    ]


def test_after_a_restart_what_is_there_is_not_sent_again(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    files = two_files()
    first = commit(store, 1, files)
    marker = make(remote).upload(1).marker
    files["optimizer.safetensors"]["m"] = noise(MIB)
    commit(store, 2, files)
    again = make(remote)
    again.remember(first, marker)
    done = again.upload(2)
    assert done.sent_bytes < 2 * MIB
    assert contents(remote, done.marker) == on_disk(store, 2)


@pytest.mark.parametrize("point", ["mirror.put_manifest", "mirror.verify", "mirror.put_marker"])
def test_an_interrupted_upload_leaves_no_marker_and_is_continued(
    store: CheckpointStore,
    remote: RemoteObjects,
    make: MakeUploader,
    fault_script: Callable[[str], None],
    point: str,
) -> None:
    commit(store, 1, two_files())
    fault_script(f"{point}:raise-EIO")
    with pytest.raises(OSError, match=f"injected at {point}"):
        make(remote).upload(1)
    assert markers(remote) == {}
    done = make(remote).upload(1)
    assert done.sent_bytes == 0
    assert contents(remote, done.marker) == on_disk(store, 1)


def test_pieces_sent_before_a_failure_are_not_sent_again(
    store: CheckpointStore,
    remote: RemoteObjects,
    make: MakeUploader,
    fault_script: Callable[[str], None],
) -> None:
    commit(store, 1, {"m.safetensors": {f"t{i}": noise(8 * MIB) for i in range(6)}})
    fault_script("mirror.put_piece:raise-EIO:4")
    with pytest.raises(OSError, match="injected"):
        make(remote).upload(1)
    there = sum(seen.num_bytes for seen in remote.list(OBJECTS).values())
    assert there > 0
    done = make(remote).upload(1)
    assert done.sent_bytes == done.marker.num_bytes - there


def test_an_object_that_was_cut_short_is_sent_again(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    commit(store, 1, two_files())
    first = make(remote).upload(1).marker
    key = max(remote.list(OBJECTS), key=lambda key: remote.list(OBJECTS)[key].num_bytes)
    remote.put(key, b"short")
    done = make(remote).upload(1)
    assert piece_of_key(key) is not None
    assert done.sent_bytes == remote.list(OBJECTS)[key].num_bytes
    assert contents(remote, done.marker) == contents(remote, first)


class Forgetful(RemoteObjects):
    """A service that acknowledges pieces and does not keep the third."""

    kept = 0

    def put(self, key: str, data: bytes | memoryview) -> str | None:
        e_tag = super().put(key, data)
        self.kept += key.startswith(OBJECTS)
        if key.startswith(OBJECTS) and self.kept == 3:
            self.delete([key])
        return e_tag


def test_a_marker_is_not_written_before_the_service_lists_every_object(
    store: CheckpointStore, make: MakeUploader
) -> None:
    commit(store, 1, two_files())
    inner = memory_remote()
    forgetful = Forgetful(inner._mirror, store=inner._store)
    with pytest.raises(OSError, match="the service lists nothing"):
        make(forgetful).upload(1)
    assert markers(forgetful) == {}
    assert contents(forgetful, make(forgetful).upload(1).marker) == on_disk(store, 1)


def test_a_checkpoint_that_is_damaged_on_disk_is_not_mirrored(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    commit(store, 1, two_files())
    path = store.path(1) / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="digest of the"):
        make(remote).upload(1)
    assert markers(remote) == {}


def test_a_step_that_was_removed_is_no_checkpoint(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    commit(store, 1, two_files())
    with pytest.raises(NoCheckpointError):
        make(remote).upload(2)


def test_a_tensor_too_long_for_memory_is_sent_in_parts(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    commit(store, 1, {"m.safetensors": {"long": noise(HELD_BYTES + 12345), "b": noise(10)}})
    done = make(remote).upload(1)
    assert contents(remote, done.marker) == on_disk(store, 1)
    assert make(remote).upload(1).sent_bytes == 0


def test_an_upload_that_is_called_off_writes_no_marker(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader
) -> None:
    commit(store, 1, two_files())

    def called_off(sending: float | None) -> None:
        raise UploadAbandonedError

    with pytest.raises(UploadAbandonedError):
        make(remote, called_off).upload(1)
    assert markers(remote) == {}


class Sending(RemoteObjects):
    """A service that lets a test know when a piece is on its way."""

    def __init__(self, inner: RemoteObjects) -> None:
        super().__init__(inner._mirror, store=inner._store)
        self.has_begun = threading.Event()

    def put(self, key: str, data: bytes | memoryview) -> str | None:
        self.has_begun.set()
        return super().put(key, data)


@pytest.mark.parametrize("may_write", [True, False])
def test_an_upload_that_is_called_off_when_all_is_on_its_way_gets_its_marker_if_it_may(
    store: CheckpointStore, remote: RemoteObjects, make: MakeUploader, may_write: bool
) -> None:
    commit(store, 1, {"m.safetensors": {"w": noise(100)}})
    service, parts = Sending(remote), []

    def called_off(sending: float | None) -> None:
        assert service.has_begun.wait(60.0)
        parts.append(sending)
        if sending is not None or not may_write:
            raise UploadAbandonedError

    uploader = make(service, called_off)
    if may_write:
        assert uploader.upload(1).marker == markers(remote)[1]
    else:
        with pytest.raises(UploadAbandonedError):
            uploader.upload(1)
        assert markers(remote) == {}
    assert parts[1] is None


def test_a_full_disk_elsewhere_is_an_error_of_the_place_that_it_names(
    store: CheckpointStore,
    remote: RemoteObjects,
    make: MakeUploader,
    fault_script: Callable[[str], None],
) -> None:
    commit(store, 1, two_files())
    fault_script("mirror.put_piece:raise-ENOSPC")
    with pytest.raises(OSError, match="injected") as error:
        make(remote).upload(1)
    assert error.value.errno == errno.ENOSPC
