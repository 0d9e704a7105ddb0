"""Memory that a killed run left is read as the disk is, and never instead of something newer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkfreq.errors import CorruptCheckpointError, NoCheckpointError
from checkfreq.restore.memory import HeldSnapshot, MemorySource
from checkfreq.store.manifest import MANIFEST_NAME
from checkfreq.store.source import newest_valid
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes

PAGE = 4096
FILES = {"model.safetensors": bytes(range(256)) * 100, "optimizer.safetensors": b"x" * 10}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path)
    made.open()
    commit_bytes(made, 1, FILES)
    commit_bytes(made, 2, FILES)
    return made


def held(store: CheckpointStore, step: int, **changes: object) -> HeldSnapshot:
    """The slot from which a committed step was written."""
    manifest, memory, offsets = store.manifest(step), bytearray(PAGE), {}
    for file in manifest.files:
        offsets[file.name] = len(memory)
        memory += (store.path(step) / file.name).read_bytes()
        memory += bytes(-len(memory) % PAGE)
    one = HeldSnapshot(
        step,
        manifest.attempt,
        (store.path(step) / MANIFEST_NAME).read_bytes(),
        offsets,
        memoryview(memory),
        is_whole=True,
        is_durable=True,
    )
    return replace(one, **changes)  # type: ignore[arg-type]


def removed(store: CheckpointStore, step: int) -> None:
    store.ops.remove_tree(store.path(step))


def read(source: MemorySource, step: int) -> dict[str, bytes]:
    """The tensors of a step, one in each file, verified."""
    found = {}
    for entry in source.verify(step).files:
        data = memoryview(bytearray(entry.num_bytes))
        assert source.open_payload(step, entry).preadinto(data, 0) == entry.num_bytes
        found[entry.name] = bytes(data[entry.header_bytes :])
    return found


def test_a_step_on_disk_is_read_from_memory(store: CheckpointStore) -> None:
    source = MemorySource(store, [held(store, 2)])
    for file in store.manifest(2).files:
        (store.path(2) / file.name).write_bytes(b"")
    assert source.steps() == [2]
    assert source.holds(2)
    assert not source.holds(1)
    assert read(source, 2) == FILES
    assert source.verify(2) == store.manifest(2)
    assert source.marks() == store.marks()


def test_a_step_that_has_yet_to_be_written_is_read_by_its_own_record(
    store: CheckpointStore,
) -> None:
    one = held(store, 2, is_durable=False)
    removed(store, 2)
    source = MemorySource(store, [one])
    assert source.steps() == [2]
    assert read(source, 2) == FILES


OTHER = {"attempt": "another", "record": b"another"}


@pytest.mark.parametrize(
    ("step", "changes", "is_on_disk"),
    [
        pytest.param(2, OTHER, True, id="of another attempt"),
        pytest.param(2, {**OTHER, "is_durable": False}, True, id="of another attempt, not durable"),
        pytest.param(2, {}, False, id="removed from the disk"),
        pytest.param(1, {"is_durable": False}, False, id="older than the disk's newest"),
        pytest.param(2, {"is_whole": False, "is_durable": False}, False, id="a part alone"),
        pytest.param(2, {}, None, id="with a damaged record on disk, which is that to report"),
    ],
)
def test_memory_is_not_used_for_a_step(
    store: CheckpointStore, step: int, changes: dict[str, object], is_on_disk: bool | None
) -> None:
    one = held(store, step, **changes)
    if is_on_disk is None:
        (store.path(step) / MANIFEST_NAME).write_bytes(b"damaged")
    elif not is_on_disk:
        removed(store, step)
    source = MemorySource(store, [one])
    assert source.steps() == []
    with pytest.raises(NoCheckpointError):
        source.record(3)


@pytest.mark.parametrize("offset", [1, 1 << 40])
def test_a_file_that_does_not_lie_in_its_slot_is_damage(
    store: CheckpointStore, offset: int
) -> None:
    one = held(store, 2)
    source = MemorySource(
        store, [replace(one, offsets={**one.offsets, "model.safetensors": offset})]
    )
    assert source.steps() == [2]
    with pytest.raises(CorruptCheckpointError, match="place in the slot"):
        source.inspect(2)


def test_a_slot_that_was_overwritten_in_part_is_walked_past_to_the_disk(
    store: CheckpointStore,
) -> None:
    one = held(store, 2)
    one.memory[one.offsets["model.safetensors"] + 5000] ^= 1
    source = MemorySource(store, [one])
    found, rejected = newest_valid([source, store], check=lambda where, step: where.verify(step))
    assert found == store.manifest(2)
    ((step, text),) = [(item.step, str(item.error)) for item in rejected]
    assert step == 2
    assert "the memory of" in text
    assert [(item.is_here, item.in_mirror, item.in_memory) for item in rejected] == [
        (False, False, True)
    ]
