"""The store on a disk that forgets: a model of what was acknowledged, and every power cut.

After a cut the disks that can be found are opened anew. On each of them every acknowledged
checkpoint is there with its bytes, and what is offered is whole: acknowledged, or the one
that was being committed. Leaving out any one sync of the commit must be found out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from checkfreq.errors import CorruptCheckpointError
from checkfreq.store.fileops import PayloadFile
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import CrashingFileOps, PowerCut, commit_bytes
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


def cuts(
    ops: CrashingFileOps, act: Callable[[CheckpointStore], object], *, limit: int = 256
) -> Iterator[tuple[int, CrashingFileOps]]:
    """Every disk that a power cut at any operation of ``act``, or after it, can leave."""
    for left in power.cuts(ops, lambda twin: act(CheckpointStore(ROOT, ops=twin)), limit=limit):
        yield left.num_calls, left.disk


def check_disk(disk: CrashingFileOps, *allowed: Checkpoints) -> None:
    """Assert that the disk has one of the ``allowed`` sets, for a reader and after a restart."""
    found = contents(CheckpointStore(ROOT, ops=disk))
    assert found in allowed
    store = new_store(disk)
    assert contents(store) == found
    assert not [name for name in disk.listdir(ROOT) if name.startswith((".tmp", ".trash"))]


class StoreMachine(RuleBasedStateMachine):
    """Commits, prunes and restarts, with power cuts at random operations of each."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = CrashingFileOps()
        self.model: Checkpoints = {}
        self.next_step = 1

    @initialize()
    def open(self) -> None:
        self.store = new_store(self.ops)

    @rule(data=st.binary(max_size=40), gap=st.integers(1, 3))
    def commit(self, data: bytes, gap: int) -> None:
        step = self.next_step + gap
        commit(self.store, step, data)
        self.model[step] = data
        self.next_step = step

    @rule(data=st.binary(max_size=40), draw=st.data())
    def commit_and_lose_power(self, data: bytes, draw: st.DataObject) -> None:
        """Go on with one of the disks that can be left."""
        step = self.next_step + 1
        self.ops.cut_power_after(draw.draw(st.integers(0, 24), label="operations before it"))
        try:
            commit(self.store, step, data)
            self.ops.cut_power_after(0)
        except PowerCut:
            pass
        disks = list(self.ops.survivors(limit=128))
        allowed = (self.model, {**self.model, step: data})
        assert all(contents(CheckpointStore(ROOT, ops=disk)) in allowed for disk in disks)
        self.ops = draw.draw(st.sampled_from(disks), label="what was found")
        self.store = new_store(self.ops)
        self.model = contents(self.store)
        self.next_step = max([self.next_step, *self.model])

    @precondition(lambda self: self.model)
    @rule(data=st.binary(max_size=40), draw=st.data())
    def commit_on_an_older_one(self, data: bytes, draw: st.DataObject) -> None:
        older = draw.draw(st.sampled_from(sorted(self.model)))
        commit(self.store, older + 1, data, after=older)
        self.model = {step: self.model[step] for step in self.model if step <= older}
        self.model[older + 1] = data
        self.next_step = older + 1

    @precondition(lambda self: len(self.model) > 1)
    @rule(draw=st.data())
    def prune(self, draw: st.DataObject) -> None:
        others = sorted(self.model)[:-1]
        doomed = draw.draw(st.lists(st.sampled_from(others), unique=True))
        assert self.store.prune(doomed) == sorted(doomed)
        self.model = {step: self.model[step] for step in self.model if step not in doomed}

    @rule()
    def restart(self) -> None:
        self.store = new_store(self.ops)

    @invariant()
    def the_store_holds_the_model(self) -> None:
        assert contents(self.store) == self.model

    @invariant()
    def what_was_acknowledged_survives_a_power_cut_now(self) -> None:
        for disk in self.ops.survivors(limit=16):
            assert contents(CheckpointStore(ROOT, ops=disk)) == self.model


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=30,
    stateful_step_count=16,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)


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
    """Something done to a directory, and every set of checkpoints that a cut in it may leave."""

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
    for point, disk in cuts(ops, change.act, limit=256 if renames else 64):
        points.add(point)
        found = contents(CheckpointStore(ROOT, ops=disk))
        check_disk(disk, *change.allowed)
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


def test_a_directory_that_was_never_synced_survives_with_its_first_checkpoint() -> None:
    """The process that created it may have been killed right afterwards."""
    ops = CrashingFileOps()
    ops.mkdir(ROOT)
    store = new_store(ops)
    commit(store, 1, b"\1" * 8)
    for disk in ops.survivors(limit=10_000):
        check_disk(disk, model_of(1))


class UnsyncedPayload:
    def __init__(self, file: PayloadFile) -> None:
        self.direct = file.direct
        self.pwrite = file.pwrite
        self.truncate = file.truncate
        self.close = file.close

    def datasync(self) -> None:
        pass


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
            return UnsyncedPayload(file) if call == "datasync" and skips(path) else file

    return Skipping


BROKEN = {
    "a payload": skipping("datasync", lambda path: True),
    "the record": skipping("sync_file", lambda path: path.name == "manifest.json"),
    "the pending directory": skipping("sync_dir", lambda path: path.name.startswith(".tmp-")),
    "the directory": skipping("sync_dir", lambda path: path == ROOT),
}


@pytest.mark.parametrize("kind", BROKEN.values(), ids=BROKEN)
def test_leaving_out_any_one_sync_is_found_by_looking_at_every_power_cut(
    kind: type[CrashingFileOps],
) -> None:
    def check_all(ops: CrashingFileOps) -> None:
        for disk in ops.survivors(limit=10_000):
            check_disk(disk, model_of(1))

    ops = disk_with(1, kind=kind)
    with pytest.raises((AssertionError, CorruptCheckpointError)):
        check_all(ops)
