"""Commit records are parsed once, and again when their bytes change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkfreq.errors import CorruptCheckpointError, NoCheckpointError
from checkfreq.store.records import Records
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes
from tests.store.parsing import steps_parsed


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path)
    made.open()
    for step in (1, 2):
        commit_bytes(made, step, {"a.safetensors": b"%d" % step}, attempt=f"a{step}")
    return made


def test_a_record_of_another_step_is_corrupt_though_it_was_parsed(store: CheckpointStore) -> None:
    records = Records(store)
    records.manifest(2)
    shutil.copy(store.path(2) / "manifest.json", store.path(1) / "manifest.json")
    with pytest.raises(CorruptCheckpointError, match="step: expected 1, got 2"):
        records.manifest(1)


def test_a_removed_step_is_no_longer_a_checkpoint(store: CheckpointStore) -> None:
    records = Records(store)
    records.manifest(1)
    store.prune([1])
    with pytest.raises(NoCheckpointError, match="step 1"):
        records.manifest(1)


def test_each_record_is_parsed_once_and_an_older_one_does_not_take_the_place_of_the_newest(
    store: CheckpointStore,
) -> None:
    records = Records(store)
    with steps_parsed() as steps:
        assert [records.summary(step).attempt for step in (1, 2, 1, 2)] == ["a1", "a2"] * 2
        newest = records.manifest(2)
        records.manifest(1)
        assert records.manifest(2) is newest
    assert steps == [1, 2, 1]
