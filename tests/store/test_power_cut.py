"""The store on a disk that forgets, and every power cut.

After a cut the disks that can be found are opened anew. On each of them every acknowledged
checkpoint is there with its bytes, and what is offered is whole: acknowledged, or the one
that was being committed. Leaving out any one sync of the commit must be found out here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkfreq.errors import CorruptCheckpointError
from checkfreq.store.fileops import PayloadFile
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import CrashingFileOps, commit_bytes
from tests.store import power

ROOT = Path("/chk")

Checkpoints = dict[int, bytes]


def content(store: CheckpointStore, step: int) -> bytes:
    """The payload of a step, after checking every digest."""
    manifest = store.verify(step)
    (file,) = manifest.files
    data = store.ops.read_bytes(store.path(step) / file.name)
    return data[file.header_bytes :]


def contents(store: CheckpointStore) -> Checkpoints:
    return {step: content(store, step) for step in store.steps()}


def commit(store: CheckpointStore, step: int, data: bytes, after: int | None = None) -> None:
    result = commit_bytes(
        store, step, {"model.safetensors": data}, attempt=f"a{step}", supersede_after=after
    )
    assert not result.kept_existing


def new_store(ops: CrashingFileOps) -> CheckpointStore:
    store = CheckpointStore(ROOT, ops=ops)
    store.open()
    return store


def check_disk(disk: CrashingFileOps, *allowed: Checkpoints) -> None:
    """Assert that the disk has one of the ``allowed`` sets, for a reader and after a restart."""
    found = contents(CheckpointStore(ROOT, ops=disk))
    assert found in allowed
    assert contents(new_store(disk)) == found
    assert not [name for name in disk.listdir(ROOT) if name.startswith((".tmp", ".trash"))]


def disk_with(*steps: int, kind: type[CrashingFileOps] = CrashingFileOps) -> CrashingFileOps:
    ops = kind()
    store = new_store(ops)
    for step in steps:
        commit(store, step, bytes([step]) * 8)
    return ops


def model_of(*steps: int) -> Checkpoints:
    return {step: bytes([step]) * 8 for step in steps}


@dataclass(frozen=True)
class Change:
    """Something done to a directory, and the sets of checkpoints that a cut in it may leave.

    After it, it is the last of them.
    """

    before: tuple[int, ...]
    act: Callable[[CheckpointStore], object]
    allowed: tuple[Checkpoints, ...]
    #: The folder in which a checkpoint is that is not offered any more: nothing is lost.
    aside: str = ""


def open_and_commit(store: CheckpointStore) -> None:
    store.open()
    commit(store, 1, b"\1" * 8)


NEW = {**model_of(1), 2: b"new"}
CHANGES = {
    "the first commit": Change((), open_and_commit, ({}, model_of(1))),
    "a commit": Change(
        (1, 2), lambda store: commit(store, 3, b"\3" * 8), (model_of(1, 2), model_of(1, 2, 3))
    ),
    "a prune": Change(
        (1, 2, 3),
        lambda store: store.prune([1, 2]),
        (model_of(1, 2, 3), model_of(1, 3), model_of(2, 3), model_of(3)),
    ),
    "a commit before later ones": Change(
        (1, 3, 4),
        lambda store: commit(store, 2, b"new", after=1),
        (model_of(1, 3, 4), model_of(1, 3), model_of(1, 4), model_of(1), NEW),
        aside="superseded",
    ),
    "a commit of a step that is there": Change(
        (1, 2),
        lambda store: commit(store, 2, b"new", after=1),
        (model_of(1, 2), model_of(1), NEW),
        aside="superseded",
    ),
    "a quarantine": Change(
        (1, 2),
        lambda store: store.quarantine(2, "bad"),
        (model_of(1, 2), model_of(1)),
        aside="quarantine",
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("renames", [True, False], ids=["renames", "no renames"])
def test_power_cut_anywhere_leaves_whole_checkpoints_of_before_or_after_and_loses_none(
    renames: bool, change: Change
) -> None:
    """``no renames``: checkpoints cannot be renamed, like those of overlayfs's lower layer."""
    ops = (disk_with if renames else fixed_disk)(*change.before)
    points = set()
    limit = 256 if renames else 64
    for point, finished, disk in power.cuts(
        ops, lambda twin: change.act(CheckpointStore(ROOT, ops=twin)), limit=limit
    ):
        points.add(point)
        found = contents(CheckpointStore(ROOT, ops=disk))
        check_disk(disk, *change.allowed[-1 if finished else 0 :])
        assert not [name for name in disk.listdir(ROOT) if name.startswith(".gone")]
        if change.aside:
            kept = set_aside(disk, change.aside)
            for step, data in model_of(*change.before).items():
                assert data in (found.get(step), kept.get(step))
    assert len(points) > 5


def fixed_disk(*steps: int) -> CrashingFileOps:
    """A disk whose checkpoints cannot be renamed."""
    ops = disk_with(*steps)
    for step in steps:
        ops.fix(ROOT / f"step-{step:08d}")
    return ops


def set_aside(disk: CrashingFileOps, folder: str) -> Checkpoints:
    """The bytes of each step in that folder."""
    path = ROOT / folder
    names = disk.listdir(path) if disk.exists(path) else []
    store = CheckpointStore(path, ops=disk)
    steps = {f"step-{step:08d}" for step in store.steps()}
    assert steps == {name for name in names if name.startswith("step-") and "reason" not in name}
    return contents(store)


def test_what_was_marked_survives_a_power_cut() -> None:
    ops = disk_with(1)
    for keep in (True, False):
        CheckpointStore(ROOT, ops=ops).add_mark(1, keep=keep)
        for disk in ops.survivors():
            assert CheckpointStore(ROOT, ops=disk).marks()[1].keep is keep


def test_a_directory_that_was_never_synced_survives_with_its_first_checkpoint() -> None:
    """The process that created it may have been killed right afterwards."""
    ops = CrashingFileOps()
    ops.mkdir(ROOT)
    store = new_store(ops)
    commit(store, 1, b"\1" * 8)
    for disk in ops.survivors(limit=10_000):
        check_disk(disk, model_of(1))


def skipping(call: str, skips: Callable[[Path], bool]) -> type[CrashingFileOps]:
    """A disk that skips these calls of that name."""

    class Skipping(CrashingFileOps):
        def sync_file(self, path: Path) -> None:
            if call != "sync_file" or not skips(path):
                super().sync_file(path)

        def sync_dir(self, path: Path) -> None:
            if call != "sync_dir" or not skips(path):
                super().sync_dir(path)

        def create_payload(self, path: Path, *, num_bytes: int) -> PayloadFile:
            file = super().create_payload(path, num_bytes=num_bytes)
            return power.UnsyncedPayload(file) if call == "datasync" and skips(path) else file

    return Skipping


BROKEN = {
    "a payload": skipping("datasync", lambda path: True),
    "the record": skipping("sync_file", lambda path: path.name == "manifest.json"),
    "the pending directory": skipping("sync_dir", lambda path: path.name.startswith(".tmp-")),
    "the directory": skipping("sync_dir", lambda path: path == ROOT),
}


@pytest.mark.parametrize("kind", BROKEN.values(), ids=BROKEN)
def test_leaving_out_any_one_sync_is_found_by_every_power_cut(kind: type[CrashingFileOps]) -> None:
    def check_all(ops: CrashingFileOps) -> None:
        for disk in ops.survivors(limit=10_000):
            check_disk(disk, model_of(1))

    ops = disk_with(1, kind=kind)
    with pytest.raises((AssertionError, CorruptCheckpointError)):
        check_all(ops)
