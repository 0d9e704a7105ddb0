"""The in-memory disk: which states it enumerates after a power cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.testing import CrashingFileOps, PowerCut

ROOT = Path("/")


def outcomes(ops: CrashingFileOps, *, limit: int = 1024) -> list[list[tuple[str, bytes]]]:
    """Names and contents of the top-level files, for every surviving disk."""
    disks = ops.survivors(limit=limit)
    return sorted([(n, d.read_bytes(ROOT / n)) for n in d.listdir(ROOT)] for d in disks)


def test_unsynced_changes_may_be_lost() -> None:
    ops = CrashingFileOps()
    ops.write_file(ROOT / "a", b"1234")
    contents = [b"", b"\0\0\0\0", b"12", b"1234"]
    assert outcomes(ops) == [[], *([("a", data)] for data in contents)]


def test_a_synced_file_without_a_synced_name_can_be_gone_but_not_torn() -> None:
    ops = CrashingFileOps()
    ops.write_file(ROOT / "a", b"1234")
    ops.sync_file(ROOT / "a")
    assert outcomes(ops) == [[], [("a", b"1234")]]
    ops.sync_dir(ROOT)
    assert outcomes(ops) == [[("a", b"1234")]]


def test_a_move_between_directories_needs_both_synced() -> None:
    ops = CrashingFileOps()
    for name in ("step", "folder"):
        ops.mkdir(ROOT / name)
    ops.sync_dir(ROOT)
    ops.rename(ROOT / "step", ROOT / "folder" / "step")
    ops.sync_dir(ROOT / "folder")
    assert len(list(ops.survivors())) == 2
    ops.rename(ROOT / "folder" / "step", ROOT / "folder" / "other")  # waits for the first move
    ops.sync_dir(ROOT / "folder")
    found = {(*d.listdir(ROOT), *d.listdir(ROOT / "folder")) for d in ops.survivors()}
    assert found == {("folder", "step"), ("folder", "step"), ("folder", "other")}
    ops.sync_dir(ROOT)
    assert [disk.listdir(ROOT / "folder") for disk in ops.survivors()] == [["other"]]


def test_too_many_outcomes_are_sampled_with_the_best_and_the_worst() -> None:
    ops = CrashingFileOps()
    for number in range(10):
        ops.write_file(ROOT / str(number), b"12345678")
    found = outcomes(ops, limit=20)
    assert 10 < len(found) <= 20
    assert [] in found
    assert [(str(number), b"12345678") for number in range(10)] in found
    assert found == outcomes(ops, limit=20)


def test_after_a_power_cut_nothing_works() -> None:
    ops = CrashingFileOps()
    ops.cut_power_after(1)
    ops.mkdir(ROOT / "a")
    with pytest.raises(PowerCut):
        ops.mkdir(ROOT / "b")
    with pytest.raises(PowerCut):
        ops.mkdir(ROOT / "b")
    with pytest.raises(PowerCut):
        ops.listdir(ROOT)


def test_a_full_disk_refuses_what_does_not_fit() -> None:
    ops = CrashingFileOps(capacity_bytes=10)
    ops.write_file(ROOT / "a", bytes(8))
    with pytest.raises(OSError, match="No space"):
        ops.write_file(ROOT / "b", bytes(3))
    assert ops.free_bytes(ROOT) == 2


def test_a_planted_link_survives_and_takes_no_space() -> None:
    ops = CrashingFileOps(capacity_bytes=4)
    ops.plant_link(ROOT / "link")
    ops.write_file(ROOT / "file", b"1234")
    ops.sync_file(ROOT / "file")
    ops.sync_dir(ROOT)
    assert [disk.listdir(ROOT) for disk in ops.survivors()] == [["file", "link"]]
