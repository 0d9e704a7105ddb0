"""torch.distributed.checkpoint's storage contract, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import (
    ConfigError,
    CorruptCheckpointError,
    NoCheckpointError,
)
from checkfreq.integrations.dcp import CFStorageReader, CFStorageWriter
from checkfreq.store.store import CheckpointStore
from tests.integrations.support import blank, failure_of, nested_state, same, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def save(chk_dir: Path, state: dict[str, Any], step: int = 1, **options: Any) -> None:
    dcp.save(state, storage_writer=CFStorageWriter(chk_dir, step=step, **options))


def load(chk_dir: Path, state: dict[str, Any], step: int | None = None, **options: Any) -> None:
    dcp.load(state, storage_reader=CFStorageReader(chk_dir, step, trust_pickle=True), **options)


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def payload(chk_dir: Path, step: int = 1) -> Path:
    return chk_dir / f"step-{step:08d}" / "dcp.safetensors"


def test_a_nested_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = nested_state()
    save(tmp_path, state)
    loaded = blank(state)
    load(tmp_path, loaded)
    assert same(loaded, state)


def test_every_leaf_comes_back_without_a_state_dict_to_fill(tmp_path: Path) -> None:
    state = nested_state()
    save(tmp_path, state)
    loaded: dict[str, Any] = {}
    _load_state_dict(
        loaded,
        storage_reader=CFStorageReader(tmp_path, trust_pickle=True),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    del state["plain"]["nothing"]  # an empty dict has no leaf
    state["ordered"] = dict(state["ordered"])  # DCP keeps no types of mappings
    assert same({key: loaded[key] for key in state}, state)


# Steps and directories.


def test_the_newest_step_is_loaded_unless_one_is_given(tmp_path: Path) -> None:
    for step in (1, 2, 30):
        save(tmp_path, {"n": step}, step=step)
    newest, second, named = {"n": 0}, {"n": 0}, {"n": 0}
    load(tmp_path, newest)
    load(tmp_path, second, step=2)
    load(tmp_path / "step-00000001", named)
    assert (newest["n"], second["n"], named["n"]) == (30, 2, 1)


def test_paths_can_come_with_the_call(tmp_path: Path) -> None:
    writer = CFStorageWriter(tmp_path, step=1)
    dcp.save({"n": 1}, storage_writer=writer)
    dcp.save({"n": 2}, storage_writer=writer, checkpoint_id=tmp_path / "step-00000002")
    reader, state = CFStorageReader(tmp_path, trust_pickle=True), {"n": 0}
    dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / "step-00000001")
    assert state == {"n": 1}
    dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path)
    assert state == {"n": 2}
    assert CFStorageReader.validate_checkpoint_id(tmp_path)
    assert not CFStorageReader.validate_checkpoint_id(tmp_path / "step-00000003")
    assert not CFStorageWriter.validate_checkpoint_id(tmp_path)


def test_overwriting_sets_the_old_step_and_later_ones_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, {"n": step}, step=step)
    save(tmp_path, {"n": 20}, step=2, overwrite=True)
    state = {"n": 0}
    load(tmp_path, state)
    assert state == {"n": 20}
    assert CheckpointStore(tmp_path).steps() == [1, 2]
    superseded = sorted(path.name for path in (tmp_path / "superseded").iterdir())
    assert superseded == ["step-00000002", "step-00000003"]


def test_a_damaged_step_may_be_written_again(tmp_path: Path) -> None:
    save(tmp_path, {"n": 1})
    flip(tmp_path / "step-00000001" / "manifest.json")
    save(tmp_path, {"n": 2})
    state = {"n": 0}
    load(tmp_path, state)
    assert state == {"n": 2}


def test_saving_is_refused_where_a_manager_runs(tmp_path: Path) -> None:
    net, optimizer = trained()
    manager = CFManager(
        tmp_path, CFCheckpoint(model=net, optimizer=optimizer), mode=CFMode.MANUAL, chk_freq=100
    )
    with manager:
        manager.restore()
        error = failure_of(lambda: save(tmp_path, {"n": 1}, lock_timeout_s=0.0))
    assert isinstance(error, ConfigError)
    assert "is being written to" in str(error)
    save(tmp_path, {"n": 1})


def test_a_writer_that_is_dropped_during_a_save_releases_the_lock(tmp_path: Path) -> None:
    writer = CFStorageWriter(tmp_path, step=1)
    writer.prepare_global_plan([])
    error = failure_of(lambda: save(tmp_path, {"n": 1}, lock_timeout_s=0.0))
    assert isinstance(error, ConfigError)
    del writer
    save(tmp_path, {"n": 1}, lock_timeout_s=0.0)
    assert CheckpointStore(tmp_path).steps() == [1]


# Damage.


def test_a_flipped_bit_in_what_is_read_is_found_and_nothing_else_is_read(tmp_path: Path) -> None:
    save(tmp_path, {"good": torch.arange(5000.0), "bad": torch.arange(5000)})
    entry = CheckpointStore(tmp_path).manifest(1).file("dcp.safetensors")
    (bad,) = [tensor for tensor in entry.tensors if tensor.name == "bad"]
    flip(payload(tmp_path), bad.offset + 100)
    state = {"good": torch.zeros(5000)}
    load(tmp_path, state)
    assert same(state["good"], torch.arange(5000.0))
    target = {"bad": torch.zeros(5000, dtype=torch.int64)}
    error = failure_of(lambda: load(tmp_path, target))
    assert isinstance(error, CorruptCheckpointError)
    assert error.check == "digest of tensor bad"
    assert not target["bad"].any()


@pytest.mark.parametrize("damage", ["missing", "manifest"])
def test_damage_found_before_reading_falls_back_to_the_step_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, {"n": step}, step=step)
    if damage == "missing":
        payload(tmp_path, 2).unlink()
    else:
        flip(tmp_path / "step-00000002" / "manifest.json")
    state = {"n": 0}
    load(tmp_path, state)
    assert state == {"n": 1}
    assert "step 2 is skipped" in caplog.text
    error = failure_of(lambda: load(tmp_path, {"n": 0}, step=2))
    assert "step-00000002" in str(error)


def test_a_directory_without_checkpoints_and_a_step_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="holds no checkpoint"):
        CFStorageReader(tmp_path, trust_pickle=True).read_metadata()
    save(tmp_path, {"n": 1})
    with pytest.raises(NoCheckpointError, match="has no step 2; it has: 1"):
        CFStorageReader(tmp_path, 2, trust_pickle=True).read_metadata()


# Other readers of the same directory.


class _Runs:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def test_pickled_values_are_not_unpickled_unless_they_are_trusted(tmp_path: Path) -> None:
    chk_dir, touched = tmp_path / "chk", tmp_path / "touched"
    state = {"w": torch.ones(2), "epoch": _Runs(touched)}
    dcp.save(state, storage_writer=CFStorageWriter(chk_dir, step=1))
    touched.unlink(missing_ok=True)
    for step in (None, 1):
        with pytest.raises(ConfigError, match=r"pickles.*trust_pickle=True"):
            CFStorageReader(chk_dir, step).read_metadata()
    with pytest.raises(CheckpointException, match="trust_pickle=True"):
        dcp.load({"w": torch.zeros(2), "epoch": 0}, storage_reader=CFStorageReader(chk_dir))
    with pytest.raises(ConfigError, match=r"trust_pickle=True"):
        checkfreq.load(chk_dir)
    assert not touched.exists()
    dcp.load(
        {"w": torch.zeros(2), "epoch": 0},
        storage_reader=CFStorageReader(chk_dir, trust_pickle=True),
    )
    assert touched.exists()
