"""Folders for the files of many ranks: who writes where, and readers that find it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from checkfreq.errors import CorruptCheckpointError, PersistError
from checkfreq.formats import numpy_reader
from checkfreq.formats.numpy_reader import open_checkpoint
from checkfreq.store import places
from checkfreq.store.joint import JointStore
from checkfreq.store.places import RANKS_A_FOLDER, folder_of, is_folder, place_of
from checkfreq.testing import CrashingFileOps
from tests.store.ranks import (
    all_write,
    commit_jointly,
    expect_whole,
    leader_begins,
    leader_commits,
    shares,
    write_part,
)

ROOT = Path("/chk")
#: Ranks in a folder, in most tests here; with so many there are three beside the checkpoint's own.
FEW, WORLD = 4, 14


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "RANKS_A_FOLDER", FEW)
    monkeypatch.setattr(numpy_reader, "RANKS_A_FOLDER", FEW)


@pytest.fixture
def store(disk: CrashingFileOps, few: None) -> JointStore:
    store = JointStore(ROOT, ops=disk, is_tree=True)
    store.open()
    return store


@pytest.fixture
def on_disk(tmp_path: Path, few: None) -> JointStore:
    store = JointStore(tmp_path / "chk", is_tree=True)
    store.open()
    commit_jointly(store, 5, world=WORLD)
    return store


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.safetensors", "model.safetensors"),
        ("model.rank-00063.safetensors", "model.rank-00063.safetensors"),
        ("model.rank-00064.safetensors", "ranks-00064/model.rank-00064.safetensors"),
        ("a.rank-00001.rank-00130.safetensors", "ranks-00128/a.rank-00001.rank-00130.safetensors"),
        ("part-04095.json", "ranks-04032/part-04095.json"),
        ("failed-100000.txt", "ranks-99968/failed-100000.txt"),
        ("model.rank-00064", "model.rank-00064"),
    ],
)
def test_a_file_lies_with_those_of_its_rank(name: str, place: str) -> None:
    assert place_of(name) == place
    assert is_folder(folder) if (folder := place.rpartition("/")[0]) else place == name


def test_the_reader_that_stands_alone_agrees() -> None:
    assert numpy_reader.RANKS_A_FOLDER == RANKS_A_FOLDER


def check_whole(store: JointStore) -> None:
    expect_whole(store, 5, world=WORLD)
    folders = filter(is_folder, store.ops.listdir(store.path(5)))
    assert [*folders] == [folder_of(4), folder_of(8), folder_of(12)]


def test_files_that_were_moved_out_of_their_folders_are_found(on_disk: JointStore) -> None:
    for folder in on_disk.path(5).glob("ranks-*"):
        for path in folder.iterdir():
            path.rename(on_disk.path(5) / path.name)
        folder.rmdir()
    on_disk.verify(5)
    open_checkpoint(on_disk.root).verify()


def test_damage_in_a_folder_is_found_and_named(on_disk: JointStore) -> None:
    folder = on_disk.path(5) / "ranks-00008"
    (folder / "rng.rank-00010.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="ranks-00008/rng.rank-00010.safetensors"):
        on_disk.verify(5)
    shutil.rmtree(folder)
    with pytest.raises(CorruptCheckpointError, match="ranks-00008/part-00008.json"):
        on_disk.glance(5)


def test_what_killed_workers_left_is_removed(store: JointStore, disk: CrashingFileOps) -> None:
    leader, pending = all_write(store, world=WORLD)
    folder = pending.path / "ranks-00004"
    for name in (".part-00007.json.new", "failed-00007.txt", ".look"):
        disk.write_file(folder / name, b"")
    leader_commits(store, pending, leader)
    check_whole(store)


def test_missing_parts_in_folders_are_named(store: JointStore) -> None:
    leader, *members = shares(world=WORLD)
    pending = leader_begins(store, leader)
    for member in members[:7]:
        write_part(store, member)
    with pytest.raises(PersistError, match=r"rank\(s\) 8, 9, 10, 11, 12, 13 wrote no part"):
        store.wait_for_parts(pending, range(1, WORLD), timeout_s=0.0)
    store.tell_failure(5, attempt="a5", rank=9, why="the disk is full")
    with pytest.raises(PersistError, match="rank 9 wrote no part: the disk is full"):
        store.wait_for_parts(pending, range(1, WORLD), timeout_s=9.0)


def test_a_directory_that_is_gone_ends_the_wait(store: JointStore, disk: CrashingFileOps) -> None:
    leader, *_ = shares(world=WORLD)
    pending = leader_begins(store, leader)
    disk.remove_tree(pending.path)
    with pytest.raises(FileNotFoundError):
        store.wait_for_parts(pending, [WORLD - 1], timeout_s=9.0)


def test_what_cannot_be_renamed_is_copied_whole(store: JointStore, disk: CrashingFileOps) -> None:
    commit_jointly(store, 4, world=3)
    commit_jointly(store, 5, world=WORLD)
    disk.fix(store.path(5))
    with pytest.raises(OSError, match=os.strerror(errno.EXDEV)):
        disk.rename(store.path(5), ROOT / "elsewhere")
    target = store.quarantine(5, "to be looked at")
    assert store.steps() == [4]
    disk.rename(target, store.path(5))
    check_whole(store)
