"""Power cuts on real file systems before every operation of a commit, a superseding commit and a
prune in turn, and right after each: mounted again, they hold every acknowledged checkpoint.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
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


#: What is done to a directory whose newest step is the second argument.
ACTIONS: dict[str, Callable[[CheckpointStore, int], object]] = {
    "commit": lambda store, step: commit(store, step + 1),
    "superseding commit": lambda store, step: commit(store, step + 1, after=step - 1),
    "prune": lambda store, step: store.prune([step - 1, step - 2]),
}

#: The steps it adds and those it takes away.
EFFECTS: dict[str, Callable[[int], tuple[set[int], set[int]]]] = {
    "commit": lambda step: ({step + 1}, set()),
    "superseding commit": lambda step: ({step + 1}, {step}),
    "prune": lambda step: (set(), {step - 1, step - 2}),
}


def power_went(ops: CuttingFileOps, act: Callable[[], object]) -> bool:
    """Act, and cut the power; returns whether that was in the middle, or right afterwards."""
    try:
        act()
    except PowerCut:
        return True
    ops.cut()
    return False


def check_volume(store: CheckpointStore, *, certain: set[int], possible: set[int]) -> None:
    """Assert that every listed step is complete and every acknowledged one is listed."""
    steps = set(store.steps())
    assert certain <= steps <= possible
    for step in steps:
        (file,) = store.verify(step).files
        assert (store.path(step) / "m").read_bytes()[file.header_bytes :] == content_of(step)


@pytest.mark.parametrize("name", ACTIONS)
def test_every_acknowledged_checkpoint_survives_a_power_cut_anywhere(
    volume: Volume, name: str
) -> None:
    store = CheckpointStore(volume.mount_point / "chk")
    for num_calls in itertools.count():
        store.open()
        step = max(store.steps(), default=0) + 3
        for new in (step - 2, step - 1, step):
            commit(store, new)
        before = set(store.steps())
        added, removed = EFFECTS[name](step)
        ops = CuttingFileOps(volume, after=num_calls)
        failing = CheckpointStore(store.root, ops=ops)
        cut = power_went(ops, partial(ACTIONS[name], failing, step))
        volume.unmount()
        volume.mount()
        if not cut:
            after = (before | added) - removed
            check_volume(store, certain=after, possible=after)
            break
        check_volume(store, certain=before - removed, possible=before | added)
    assert num_calls > 5


def test_a_store_that_syncs_nothing_loses_what_it_acknowledged(volume: Volume) -> None:
    """Shows that the cut is a real one: what was never synced must be gone."""

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
