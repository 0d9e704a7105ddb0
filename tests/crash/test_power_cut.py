"""Power cuts on real file systems: ext4 and xfs on loop mounts, shut down without flushing.

FS_IOC_SHUTDOWN drops everything that has not reached the device, as a power cut does. It is
given before every operation of a commit, a superseding commit and a prune in turn, and right
after each; then the volume is mounted again and must hold every acknowledged checkpoint.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from checkfreq.store.fileops import LocalFileOps, PayloadFile
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import PowerCut, commit_bytes

pytestmark = [pytest.mark.crash, pytest.mark.slow]

_FS_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2

#: Image size in bytes (sparse), the command that formats it, and mount options. The journal
#: is not to be written by a timer while the test counts on its not being written.
VOLUMES = {
    "ext4": (64 << 20, ["mkfs.ext4", "-q", "-F"], "loop,commit=300"),
    "xfs": (320 << 20, ["mkfs.xfs", "-q", "-f"], "loop"),
}


class Volume:
    """A file system in an image file that can lose power."""

    def __init__(self, kind: str, folder: Path) -> None:
        num_bytes, self._format, self._options = VOLUMES[kind]
        self._image = folder / f"{kind}.img"
        self._kind = kind
        self.mount_point = folder / kind
        self.mount_point.mkdir()
        self._mounted = False  # os.path.ismount says no of a volume that was shut down
        self._image.touch()
        os.truncate(self._image, num_bytes)

    def format(self) -> None:
        _call([*self._format, str(self._image)])

    def mount(self) -> None:
        image, target = str(self._image), str(self.mount_point)
        _call(["mount", "-t", self._kind, "-o", self._options, image, target])
        self._mounted = True

    def cut_power(self) -> None:
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, struct.pack("i", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        if self._mounted:
            _call(["umount", str(self.mount_point)])
            self._mounted = False


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture(params=sorted(VOLUMES))
def volume(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Volume]:
    kind: str = request.param
    program = VOLUMES[kind][1][0]
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian: e2fsprogs, xfsprogs)")
    volume = Volume(kind, tmp_path)
    volume.format()
    try:
        volume.mount()
    except OSError as error:
        pytest.skip(f"this machine cannot mount a {kind} image: {error}")
    try:
        yield volume
    finally:
        volume.unmount()


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
