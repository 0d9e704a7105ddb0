"""The power cut of the acceptance tests is a real one: what was never synced is gone after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq.store.fileops import LocalFileOps, PayloadFile
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import PowerCut, commit_bytes
from tests.acceptance.volumes import VOLUMES, Volume, mounted

pytestmark = [pytest.mark.crash, pytest.mark.slow]


@pytest.fixture(params=sorted(VOLUMES))
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Volume]:
    with mounted(request.param, tmp_path) as found:
        yield found


class CuttingFileOps(LocalFileOps):
    """The operating system's file operations, until the power is cut instead of one of them."""

    def __init__(self, volume: Volume, *, after: int) -> None:
        super().__init__(volume.mount_point / "chk")
        self._volume = volume
        self._left = after
        self._files: list[PayloadFile] = []

    def count(self) -> None:
        if self._left == 0:
            self.cut()
            raise PowerCut
        self._left -= 1

    def cut(self) -> None:
        self._volume.cut_power()
        for file in self._files:  # or the volume could not be unmounted
            file.close()

    def mkdir(self, path: Path, *, parents: bool = False) -> None:
        self.count()
        super().mkdir(path, parents=parents)

    def write_file(self, path: Path, data: bytes) -> None:
        self.count()
        super().write_file(path, data)

    def sync_file(self, path: Path) -> None:
        self.count()
        super().sync_file(path)

    def sync_dir(self, path: Path) -> None:
        self.count()
        super().sync_dir(path)

    def rename(self, src: Path, dst: Path) -> None:
        self.count()
        super().rename(src, dst)

    def remove_tree(self, path: Path) -> None:
        self.count()
        for name in self.listdir(path)[:1]:  # half of it, then perhaps the power
            os.unlink(path / name)
        self.count()
        super().remove_tree(path)

    def replace_file(self, path: Path, data: bytes, *, sync: bool = True) -> None:
        self.count()
        super().replace_file(path, data, sync=sync)

    def create_payload(self, path: Path, *, num_bytes: int) -> PayloadFile:
        self.count()
        file = super().create_payload(path, num_bytes=num_bytes)
        self._files.append(file)
        return CuttingPayload(file, self)


class CuttingPayload:
    def __init__(self, file: PayloadFile, ops: CuttingFileOps) -> None:
        self._file = file
        self._ops = ops
        self.direct = file.direct
        self.close = file.close

    def pwrite(self, view: memoryview, offset: int) -> None:
        self._ops.count()
        self._file.pwrite(view, offset)

    def truncate(self, num_bytes: int) -> None:
        self._ops.count()
        self._file.truncate(num_bytes)

    def datasync(self) -> None:
        self._ops.count()
        self._file.datasync()


def content_of(step: int) -> bytes:
    return f"state of step {step}".encode() * 500


def commit(store: CheckpointStore, step: int, after: int | None = None) -> None:
    commit_bytes(store, step, {"m": content_of(step)}, attempt=f"a{step}", supersede_after=after)


def test_a_store_that_syncs_nothing_loses_what_it_acknowledged(volume: Volume) -> None:
    class UnsyncedPayload:
        def __init__(self, file: PayloadFile) -> None:
            self.direct = file.direct
            self.pwrite = file.pwrite
            self.truncate = file.truncate
            self.close = file.close

        def datasync(self) -> None:
            pass

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
