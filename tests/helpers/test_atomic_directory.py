"""AtomicDirectory: the pointer leads to a whole checkpoint at any instant."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from checkfreq.errors import ConfigError, NoCheckpointError, StateError
from checkfreq.helpers import AtomicDirectory
from checkfreq.testing import CrashingFileOps
from tests.helpers.support import ROOT, after_a_cut_anywhere, empty_disk
from tests.state.ranks import run_ranks

DEADLINE_S = 120.0


def checkpoint(ops: CrashingFileOps, step: int, *, keep_last: int = -1) -> None:
    """Write a checkpoint of two files, one in a folder, by means that sync nothing."""
    saver = AtomicDirectory(ROOT, keep_last=keep_last, ops=ops)
    folder = saver.prepare_checkpoint_directory()
    ops.write_file(folder / "model", b"model %d" % step)
    ops.mkdir(folder / "more")
    ops.write_file(folder / "more" / "data", b"data %d" % step)
    saver.atomic_symlink(folder)


def step_of(ops: CrashingFileOps) -> int | None:
    """The step of the latest checkpoint, which must be whole."""
    latest = AtomicDirectory(ROOT, ops=ops).latest()
    if latest is None:
        return None
    step = int(ops.read_bytes(latest / "model").split()[1])
    assert ops.read_bytes(latest / "more" / "data") == b"data %d" % step
    return step


@pytest.mark.parametrize("before", ["nothing", "a folder", "a checkpoint"])
def test_a_power_cut_at_any_instant_leaves_the_old_checkpoint_or_the_new_one(before: str) -> None:
    disk = CrashingFileOps() if before == "nothing" else empty_disk()
    if before == "a checkpoint":
        checkpoint(disk, 1)
    left = set()
    for survivor, returned in after_a_cut_anywhere(disk, lambda ops: checkpoint(ops, 2)):
        step = step_of(survivor)
        assert step == 2 or not returned
        left.add(step)
    assert left == {1 if before == "a checkpoint" else None, 2}


def test_a_power_cut_while_old_ones_are_removed_loses_none_that_counts_and_the_next_works() -> None:
    disk = empty_disk()
    for step in (1, 2):
        checkpoint(disk, step)
    for survivor, _ in after_a_cut_anywhere(disk, lambda ops: checkpoint(ops, 3, keep_last=1)):
        assert step_of(survivor) in (2, 3)
        for name in survivor.listdir(ROOT):
            if name == "AtomicDirectory_checkpoint_0":  # it is not there in part
                assert survivor.listdir(ROOT / name) == ["model", "more"]
        checkpoint(survivor, 4, keep_last=1)
        assert step_of(survivor) == 4
        assert len(survivor.listdir(ROOT)) == 2


def write(saver: AtomicDirectory, text: str, *, force_save: bool = False) -> Path:
    folder = saver.prepare_checkpoint_directory(force_save)
    (folder / "model").write_text(text)
    saver.atomic_symlink(folder)
    return folder


def folders(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if "latest" not in name)


def test_the_pointer_is_a_link_that_leads_to_the_latest_checkpoint(tmp_path: Path) -> None:
    saver = AtomicDirectory(tmp_path / "new" / "out")
    assert saver.latest() is None
    first = write(saver, "one")
    folder = saver.prepare_checkpoint_directory()
    assert saver.latest() == first, "while the next one is written"
    (folder / "model").write_text("two")
    (folder / "data").symlink_to("/nowhere")  # which is kept, and not followed
    saver.atomic_symlink(folder)
    link = tmp_path / "new" / "out" / saver.symlink_name
    assert (link / "model").read_text() == "two"
    assert os.path.join(link.parent, os.readlink(link)) == str(saver.latest()) == str(folder)
    assert os.readlink(folder / "data") == "/nowhere"
    link.parent.rename(tmp_path / "moved")
    assert AtomicDirectory(tmp_path / "moved").latest() == tmp_path / "moved" / folder.name


def test_a_directory_of_cycling_utils_is_continued(tmp_path: Path) -> None:
    old = tmp_path / "AtomicDirectory_checkpoint_4"
    old.mkdir()
    (tmp_path / "AtomicDirectory.latest_checkpoint").symlink_to(old)
    saver = AtomicDirectory(tmp_path)
    assert saver.latest() == old
    folder = saver.prepare_checkpoint_directory()
    saver.symlink_latest(folder)
    assert saver.latest() == folder == tmp_path / "AtomicDirectory_checkpoint_5"


@pytest.mark.parametrize(
    ("keep_last", "kept"), [(2, "1_force 3 4 5_force"), (9, "0 1_force 2 3 4 5_force")]
)
def test_the_last_complete_checkpoints_are_kept_and_forced_ones_besides(
    keep_last: int, kept: str, tmp_path: Path
) -> None:
    saver = AtomicDirectory(tmp_path, keep_last=keep_last)
    for number in range(6):
        write(saver, str(number), force_save=number in (1, 5))
    assert folders(tmp_path) == [f"AtomicDirectory_checkpoint_{name}" for name in kept.split()]


def test_what_an_interrupted_checkpoint_left_is_removed_by_the_next(tmp_path: Path) -> None:
    saver = AtomicDirectory(tmp_path)
    write(saver, "one")
    (saver.prepare_checkpoint_directory() / "half").write_text("")
    gone = tmp_path / ".AtomicDirectory_checkpoint_0.gone"
    gone.mkdir()
    again = AtomicDirectory(tmp_path).prepare_checkpoint_directory()
    assert os.listdir(again) == []
    assert not gone.exists()
    assert len(folders(tmp_path)) == 2


def test_without_a_pointer_nothing_is_removed_and_one_to_nothing_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = AtomicDirectory(tmp_path)
    write(saver, "one")
    write(saver, "two").rename(tmp_path / "elsewhere")
    with pytest.raises(NoCheckpointError, match="Copy that folder back, or remove the pointer"):
        saver.latest()
    (tmp_path / "elsewhere").rename(tmp_path / "AtomicDirectory_checkpoint_1")
    (tmp_path / saver.symlink_name).unlink()
    folder = saver.prepare_checkpoint_directory()
    assert folder.name == "AtomicDirectory_checkpoint_2"
    assert len(folders(tmp_path)) == 3
    assert "no pointer AtomicDirectory.latest_checkpoint" in caplog.text


def test_a_folder_that_was_not_prepared_is_refused(tmp_path: Path) -> None:
    for given in ("elsewhere", "AtomicDirectory_checkpoint_7"):
        with pytest.raises(StateError, match="prepare_checkpoint_directory"):
            AtomicDirectory(tmp_path).atomic_symlink(given)


@pytest.mark.parametrize(
    "arguments", [{"keep_last": 0}, {"keep_last": True}, {"name": "a/b"}, {"strategy": "both"}]
)
def test_arguments_out_of_range_are_refused_by_name(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"AtomicDirectory\({next(iter(arguments))}=\.\.\.\)"):
        AtomicDirectory(tmp_path, **arguments)


def _train(role: Any, root: Path, strategy: Any) -> list[tuple[str, list[str]]]:
    saver = AtomicDirectory(root, strategy=strategy, keep_last=1)
    found = []
    for step in range(3):
        folder = saver.prepare_checkpoint_directory(step == 1 and role.rank == 1)
        (folder / f"rank-{role.rank}").write_text(str(step))
        saver.atomic_symlink(folder)
        latest = saver.latest()
        assert latest == folder
        found.append((folder.name, sorted(os.listdir(folder))))
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "suffix"),
    [("sync_any", "_force"), pytest.param("sync_all", "", marks=pytest.mark.more)],
)
def test_ranks_write_one_checkpoint_together(strategy: str, suffix: str, tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, 2, _train, tmp_path / "out", strategy)
    names = [f"AtomicDirectory_checkpoint_{n}{suffix if n == 1 else ''}" for n in range(3)]
    assert first == second == [(name, ["rank-0", "rank-1"]) for name in names]
    kept = [names[1], names[2]] if suffix else [names[2]]
    assert folders(tmp_path / "out") == kept


def _fail_on_one(role: Any, root: Path) -> tuple[str, list[str], str | None]:
    saver = AtomicDirectory(root)
    saver.atomic_symlink(saver.prepare_checkpoint_directory())
    saver.prepare_checkpoint_directory()
    wrong = f"AtomicDirectory_checkpoint_{role.rank}" if role.rank == 0 else "another"
    try:
        saver.atomic_symlink(wrong)
    except StateError as error:
        latest = saver.latest()
        notes = getattr(error, "__notes__", [])
        return str(error), notes, None if latest is None else latest.name
    return "nothing was raised", [], None


@pytest.mark.dist
def test_a_failure_of_one_rank_is_raised_on_every_rank(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 2, _fail_on_one, tmp_path / "out")
    texts = {text for text, _, _ in results}
    assert len(texts) == 1
    assert "'another'" in texts.pop()
    assert [notes for _, notes, _ in results] == [["on rank 1"], []]
    assert [latest for _, _, latest in results] == ["AtomicDirectory_checkpoint_0"] * 2
