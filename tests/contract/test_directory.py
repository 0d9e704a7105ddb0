"""Where a run keeps its checkpoints: found once, watched, and shared with nobody's links."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import checkfreq
from checkfreq import KeepLast
from checkfreq.errors import CheckFreqError
from checkfreq.store.store import CheckpointStore
from tests.contract.runs import Training, config, managed, running, written


def one(training: Training, manager: checkfreq.CFManager) -> None:
    """An iteration whose checkpoint, at chk_freq=1, has ended."""
    training.steps(manager, 1)
    manager.wait()


def kill_worker(manager: checkfreq.CFManager) -> None:
    process = manager._persistence._client._process
    assert process is not None
    process.kill()
    assert process.wait(60.0)


def test_a_relative_directory_stays_where_it_was_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    monkeypatch.chdir(home)
    with running(Path("chk"), chk_freq=1, retention=KeepLast(2)) as (training, manager):
        one(training, manager)
        os.chdir(other)
        one(training, manager)
        assert manager.all_steps() == [1, 2]
        kill_worker(manager)
        for _ in range(2):
            one(training, manager)
    assert CheckpointStore(home / "chk").steps() == [3, 4]
    assert os.listdir(other) == []


def test_the_directory_and_its_parents_may_be_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "run").mkdir()
    (tmp_path / "home").symlink_to("disk")
    (tmp_path / "disk" / "chk").symlink_to("run")
    written(tmp_path / "home" / "chk", 2)
    assert CheckpointStore(tmp_path / "disk" / "run").steps() == [1, 2]
    assert checkfreq.load(tmp_path / "home" / "chk", step=1)
    with managed(tmp_path / "home" / "chk", Training().chk) as manager:
        assert manager.restore()


def test_a_directory_removed_while_training_is_made_again_and_said(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(chk_dir, chk_freq=1, retention=KeepLast(2)) as (training, manager):
        one(training, manager)
        shutil.rmtree(chk_dir)
        for _ in range(4):
            one(training, manager)
        assert manager.stats()["num_failed"] == 0
    assert CheckpointStore(chk_dir).steps() == [4, 5]
    (record,) = (r for r in caplog.records if "earlier checkpoints are gone" in r.getMessage())
    assert record.levelno == logging.ERROR
    assert "it was removed while training" in record.getMessage()
    assert '"kind": "retaken"' in (chk_dir / "events.jsonl").read_text()


def test_a_directory_removed_together_with_the_worker_is_made_again_and_said(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(chk_dir, chk_freq=1) as (training, manager):
        one(training, manager)
        kill_worker(manager)
        shutil.rmtree(chk_dir)
        one(training, manager)
        assert manager.all_steps() == [2]
    assert f"{chk_dir}: step(s) [1] are gone" in caplog.text


def test_two_runs_that_a_deleted_lock_file_let_in_do_not_both_write(chk_dir: Path) -> None:
    first, second = Training(), Training()
    one_manager = managed(chk_dir, first.chk, chk_freq=1, tolerate_failures=1000)
    one(first, one_manager)
    (chk_dir / ".lock").unlink()
    with managed(chk_dir, second.chk, chk_freq=0) as manager:
        assert manager.restore()
        one(first, one_manager)
        event = one_manager.last_event
        assert event is not None
        assert (event.kind, event.step) == ("failed", 2)
        assert "locked by the persist worker" in str(event.data["error"])
        second.steps(manager, 3)
        manager.save(wait=True)
        assert manager.all_steps() == [1, 4]
    one(first, one_manager)
    event = one_manager.last_event
    assert event is not None
    assert "has step 4, newer than any of this run" in str(event.data["error"])
    with pytest.raises(CheckFreqError, match="newer than any of this run"):
        one_manager.close()


# What is not ours inside of it.


@pytest.mark.parametrize("plant", [Path.symlink_to, lambda path, target: os.mkfifo(path)])
@pytest.mark.parametrize(
    "names",
    [
        (".lock",),
        (".latest.new", "events.jsonl", ".profile.json.new", "trace.jsonl"),
        ("latest", "profile.json"),
        ("marks.jsonl",),
    ],
)
def test_nothing_is_written_through_what_was_planted_in_the_directory(
    names: tuple[str, ...], plant: Callable[[Path, Path], None], chk_dir: Path, tmp_path: Path
) -> None:
    chk_dir.mkdir()
    (tmp_path / "bashrc").write_text("mine\n")
    for name in names:
        plant(chk_dir / name, tmp_path / "bashrc")
    training = Training()
    auto = {"mode": checkfreq.CFMode.AUTO, "chk_freq": None}
    refused = ""
    try:
        with managed(chk_dir, training.chk, config=config(record_trace=True), **auto) as manager:
            one(training, manager)
            manager.save(wait=True, keep=True)
            one(training, manager)
    except CheckFreqError as error:
        refused = str(error)
    is_said = any(name in refused for name in names)
    assert is_said or CheckpointStore(chk_dir).verify(1).step == 1
    assert (tmp_path / "bashrc").read_text() == "mine\n"


def test_nothing_is_deleted_behind_a_link_in_the_directory(chk_dir: Path, tmp_path: Path) -> None:
    precious, names = tmp_path / "precious", (".tmp-1-a", ".trash-1", ".tmp-x", "step-00000001")
    written(chk_dir, 2)
    (chk_dir / "step-00000001").rename(precious)
    (precious / "thesis").write_text("x")
    before = sorted(os.listdir(precious))
    for name in names:
        (chk_dir / name).symlink_to(precious)
    with running(chk_dir, chk_freq=1, retention=KeepLast(1)) as (training, manager):
        manager.restore()
        for _ in range(3):
            one(training, manager)
    assert sorted(os.listdir(precious)) == before
    assert [name for name in names if (chk_dir / name).is_symlink()] == ["step-00000001"]


def test_everything_a_run_writes_has_the_modes_that_the_umask_leaves(chk_dir: Path) -> None:
    umask = 0o023
    before = os.umask(umask)
    try:
        auto = {"mode": checkfreq.CFMode.AUTO, "chk_freq": None}
        with running(chk_dir, **auto) as (training, manager):
            one(training, manager)
            manager.save(wait=True, keep=True)
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(chk_dir.parent)): path.stat().st_mode & 0o777
        for path in [chk_dir, *chk_dir.rglob("*")]
    }
    assert {"chk/events.jsonl", "chk/profile.json", "chk/marks.jsonl"} <= {*modes}
    assert modes.pop("chk/.lock") == 0o600
    for name, mode in modes.items():
        is_dir = (chk_dir.parent / name).is_dir()
        assert mode == (0o777 if is_dir else 0o666) & ~umask, name


def test_a_run_goes_on_in_its_own_files_after_a_copy_by_hard_links(chk_dir: Path) -> None:
    backup = chk_dir.with_name("backup")
    with running(chk_dir) as (training, manager):
        one(training, manager)
        manager.save(wait=True, keep=True)
        subprocess.run(["cp", "-al", str(chk_dir), str(backup)], check=True)
        before = {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()}
        assert {"events.jsonl", "marks.jsonl", ".lock"} <= {path.name for path in before}
        one(training, manager)
        manager.save(wait=True, keep=True)
        assert manager.all_steps() == [1, 2]
    assert {path: path.read_bytes() for path in before} == before
    with managed(backup, training.chk, config=config(takeover_s=0.0)) as manager:
        assert manager.all_steps() == [1]
