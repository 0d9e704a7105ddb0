"""atomic_save: the old file or the new one, at any instant and after any failure."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq.errors import ConfigError, StorageError
from checkfreq.helpers import atomic_save
from tests.helpers.support import ROOT, after_a_cut_anywhere, empty_disk, loaded

DEADLINE_S = 120.0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"_disable_byteorder_record": True},
        {"_use_new_zipfile_serialization": False, "pickle_protocol": 3},
    ],
)
def test_the_bytes_and_the_further_arguments_are_those_of_torch_save(
    options: dict[str, Any], tmp_path: Path
) -> None:
    state = {"weights": torch.arange(100_000)}
    torch.save(state, whole := io.BytesIO(), **options)
    atomic_save(state, str(tmp_path / "model.pt"), **options)
    assert (tmp_path / "model.pt").read_bytes() == whole.getvalue()
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.parametrize("is_first", [False, True])
def test_a_power_cut_at_any_instant_leaves_the_old_file_or_the_new_one(is_first: bool) -> None:
    disk = empty_disk()
    if not is_first:
        atomic_save({"step": 1}, ROOT / "model.pt", ops=disk)
    left: set[int | None] = set()
    for survivor, returned in after_a_cut_anywhere(
        disk, lambda ops: atomic_save({"step": 2}, ROOT / "model.pt", ops=ops)
    ):
        exists = survivor.exists(ROOT / "model.pt")
        step = loaded(survivor.read_bytes(ROOT / "model.pt"))["step"] if exists else None
        assert step == 2 or not returned
        left.add(step)
    assert left == {None if is_first else 1, 2}


def test_an_error_of_any_operation_leaves_the_old_file_alone() -> None:
    disk = empty_disk()
    atomic_save({"step": 1}, ROOT / "model.pt", ops=disk)
    undisturbed = disk.fork()
    atomic_save({"step": 2}, ROOT / "model.pt", ops=undisturbed)
    num_calls = len(undisturbed.calls)
    assert undisturbed.calls[-1] == f"sync_dir {ROOT}"
    for instant in range(num_calls - 1):  # the last only makes durable what is done
        twin = disk.fork()
        twin.fail_after(instant, OSError(errno.EIO, os.strerror(errno.EIO)))
        with pytest.raises(StorageError, match=r"atomic_save to .*model\.pt.*Input/output"):
            atomic_save({"step": 2}, ROOT / "model.pt", ops=twin)
        assert loaded(twin.read_bytes(ROOT / "model.pt")) == {"step": 1}
        assert twin.listdir(ROOT) == ["model.pt"]


class Interrupting:
    """Raises while it is pickled."""

    def __reduce__(self) -> str:
        raise KeyboardInterrupt


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    atomic_save({"step": 1}, tmp_path / "model.pt")
    with pytest.raises(KeyboardInterrupt):
        atomic_save([torch.ones(4), Interrupting()], tmp_path / "model.pt")
    assert os.listdir(tmp_path) == ["model.pt"]
    assert torch.load(tmp_path / "model.pt") == {"step": 1}


def test_what_cannot_be_replaced_is_refused_with_the_reason_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    for target in (io.BytesIO(), 3, None):
        with pytest.raises(ConfigError, match="an open file cannot be written atomically"):
            atomic_save({}, target)  # type: ignore[arg-type]
    (tmp_path / "folder").mkdir()
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name, why in (
        ("gone/model.pt", "No such file"),
        ("folder", "Is a directory"),
        ("a", "a chain of symbolic links that does not end"),
    ):
        with pytest.raises(StorageError, match=why):
            atomic_save({}, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "folder"]


def test_a_replaced_file_keeps_its_permissions_and_a_new_one_has_the_umasks(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model.pt"
    atomic_save(1, path)
    torch.save(1, tmp_path / "other.pt")
    assert path.stat().st_mode == (tmp_path / "other.pt").stat().st_mode
    path.chmod(0o640)
    atomic_save(2, path)
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_a_link_points_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "latest.pt").symlink_to("second.pt")
    (tmp_path / "second.pt").symlink_to(tmp_path / "run" / "model.pt")
    atomic_save(1, tmp_path / "latest.pt")
    assert (tmp_path / "latest.pt").is_symlink()
    assert os.listdir(tmp_path / "run") == ["model.pt"]
    assert torch.load(tmp_path / "latest.pt") == 1


def test_a_file_that_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    host = os.uname().nodename
    living = tmp_path / f".model.pt.{host}.{os.getppid()}.0.saving"
    odd = tmp_path / f".model.pt.{host}.what.saving"
    vast = tmp_path / f".model.pt.{host}.{10**30}.0.saving"
    other = tmp_path / ".model.pt.elsewhere.1.0.saving"
    own = tmp_path / f".model.pt.{host}.{os.getpid()}.999999.saving"
    for left in (living, odd, vast, other, own):
        left.write_bytes(b"half")
    atomic_save(1, tmp_path / "model.pt")
    assert sorted(os.listdir(tmp_path)) == sorted([living.name, other.name, "model.pt"])
