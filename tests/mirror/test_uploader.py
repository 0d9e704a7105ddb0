"""One checkpoint to an object store, and what is sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkfreq.errors import NoCheckpointError
from checkfreq.mirror.bandwidth import Bandwidth
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import OBJECTS, Marker
from checkfreq.mirror.settings import Mirror
from checkfreq.mirror.uploader import HELD_BYTES, UploadAbandonedError, Uploader
from checkfreq.store.joint import JointStore
from checkfreq.store.manifest import Manifest
from checkfreq.store.tree import Tree
from tests.mirror.checkpoints import MIB, Place, commit, contents, markers, noise, on_disk
from tests.store.ranks import commit_jointly


class World(Place):
    """With uploaders, and files of several tensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._made: list[Uploader] = []
        self.files = {
            "model.safetensors": {"frozen": noise(9 * MIB), "head": noise(1000), "empty": b""},
            "optimizer.safetensors": {"m": noise(MIB), "v": noise(12 * MIB)},
        }

    def uploader(self, **changes: Any) -> Uploader:
        """A new one, which knows of no earlier upload."""
        arguments = {"bandwidth": Bandwidth(None), "part_bytes": 16 * MIB, **changes}
        one = Uploader(self.remote, self.store, **{"go_on": lambda sending: None, **arguments})
        self._made.append(one)
        return one

    def commit(self, step: int) -> Manifest:
        return commit(self.store, step, self.files)

    def is_whole(self, marker: Marker) -> bool:
        """Whether its objects are the files of the directory, byte for byte."""
        return contents(self.remote, marker) == on_disk(self.store, marker.step)

    def end(self) -> None:
        for one in self._made:
            one.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "chk")
    yield made
    made.end()


def test_of_many_ranks_records_the_mirror_keeps_one(world: World) -> None:
    joint = JointStore(world.store.root, is_tree=True)
    joint.open()
    commit_jointly(joint, 7, world=3)
    assert isinstance(world.store.head(7), Tree)
    marker = world.uploader().upload(7).marker
    found, files = contents(world.remote, marker), on_disk(world.store, 7)
    record = found.pop("manifest.json")
    assert Manifest.decode(record, path="m") == world.store.manifest(7)
    assert set(marker.files) == {file.name for file in world.store.manifest(7).files}
    assert found == {name: files[name] for name in marker.files}


def test_the_objects_of_a_marker_are_the_files_byte_for_byte(world: World) -> None:
    world.commit(7)
    done = world.uploader().upload(7, at_epoch_end=True)
    assert world.is_whole(done.marker)
    assert markers(world.remote) == {7: done.marker}
    assert done.marker.at_epoch_end
    assert done.sent_bytes == done.marker.num_bytes
    with pytest.raises(NoCheckpointError):
        world.uploader().upload(8)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_what_has_not_changed_is_sent_once(world: World, is_restarted: bool) -> None:
    manifest, uploader = world.commit(1), world.uploader()
    marker = uploader.upload(1).marker
    if is_restarted:
        uploader = world.uploader()
        uploader.remember(manifest, marker)
    world.files["optimizer.safetensors"]["m"] = noise(MIB)
    world.commit(2)
    done = uploader.upload(2)
    assert done.sent_bytes < 2 * MIB
    assert world.is_whole(done.marker)


def test_what_twenty_uploads_share_is_sent_anew(world: World) -> None:
    uploader, frozen, sent = world.uploader(), noise(MIB), []
    for step in range(1, 24):
        commit(world.store, step, {"m.safetensors": {"frozen": frozen, "w": noise(100)}})
        sent.append(uploader.upload(step).sent_bytes)
    assert [step for step, num_bytes in enumerate(sent, 1) if num_bytes >= MIB] == [
        *(1, 2, 23)  # the second in a piece of its own
    ]


@pytest.mark.parametrize("fault", ["mirror.put_piece:raise-ENOSPC:4", "mirror.verify:raise-EIO"])
def test_an_interrupted_upload_leaves_no_marker_and_is_continued(
    world: World, fault_script: Callable[[str], None], fault: str
) -> None:
    world.files = {"m.safetensors": {f"t{i}": noise(8 * MIB) for i in range(6)}}
    world.commit(1)
    fault_script(fault)
    with pytest.raises(OSError, match="injected at mirror"):
        world.uploader().upload(1)
    assert markers(world.remote) == {}
    there = sum(seen.num_bytes for seen in world.remote.list(OBJECTS).values())
    assert there > 0
    done = world.uploader().upload(1)
    assert done.sent_bytes == done.marker.num_bytes - there
    assert world.is_whole(done.marker)


class Forgetful(RemoteObjects):
    """A service that acknowledges pieces and does not keep the third."""

    kept = 0

    def put(self, key: str, data: bytes | memoryview) -> str | None:
        e_tag = super().put(key, data)
        self.kept += key.startswith(OBJECTS)
        if key.startswith(OBJECTS) and self.kept == 3:
            self.delete([key])
        return e_tag


def test_a_marker_is_not_written_before_the_service_lists_every_object(world: World) -> None:
    world.commit(1)
    world.serve(Forgetful)
    with pytest.raises(OSError, match="the service lists nothing"):
        world.uploader().upload(1)
    assert markers(world.remote) == {}
    assert world.is_whole(world.uploader().upload(1).marker)


def test_a_tensor_too_long_for_memory_is_sent_in_parts(world: World) -> None:
    world.files = {"m.safetensors": {"long": bytes(HELD_BYTES + 12345), "b": noise(10)}}
    world.commit(1)
    assert world.is_whole(world.uploader().upload(1).marker)
    assert world.uploader().upload(1).sent_bytes == 0


def test_an_upload_that_is_called_off_gets_no_marker(world: World) -> None:
    def called_off(sending: float | None) -> None:
        raise UploadAbandonedError

    commit(world.store, 1, {"m.safetensors": {"w": noise(100)}})
    with pytest.raises(UploadAbandonedError):
        world.uploader(go_on=called_off).upload(1)
    assert markers(world.remote) == {}


class FakeTime:
    """Only pauses move it."""

    now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_an_upload_is_as_slow_as_its_limit_whatever_time_passed_before(world: World) -> None:
    commit(world.store, 1, {"m.safetensors": {f"t{i}": noise(8 * MIB) for i in range(5)}})
    time, mirror = FakeTime(), Mirror("memory:///x", max_bytes_per_s=4 * MIB)
    limit = Bandwidth(mirror.max_bytes_per_s, clock=lambda: time.now_s, sleep=time.sleep)
    time.now_s += 3600.0
    world.uploader(bandwidth=limit, part_bytes=mirror.part_bytes).upload(1)
    # Five tensors of 8 MiB at 4 MiB a second, before the last of which nothing more waits.
    assert time.now_s - 3700.0 >= 8.0
    before_s = time.now_s
    Bandwidth(None, clock=lambda: time.now_s, sleep=time.sleep).wait_for(1 << 40)
    assert time.now_s == before_s
