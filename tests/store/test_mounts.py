"""The file system of a directory, from lists of mounts as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkfreq.store.mounts import Mount, mount_of


def device_of(path: Path) -> str:
    number = os.stat(path).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """A list of the root, and of a mount around this test whose name has a space."""
    (tmp_path / "a b").mkdir()
    point = str(tmp_path / "a b").replace(" ", "\\040")
    device = device_of(tmp_path)
    path = tmp_path / "mountinfo"
    path.write_text(
        f"1 0 9:9 / / rw - ext4 /dev/root rw\n"
        f"this line is none\n2 1 {device} / / rw -\n"
        f"3 1 {device} / {point} rw shared:1 - xfs /dev/hidden rw\n"
        f"4 1 {device} / {point} rw shared:1 - xfs /dev/a\\040disk rw\n"
    )
    return path


def test_of_mounts_at_one_place_the_latest_is_named(listed: Path, tmp_path: Path) -> None:
    place = tmp_path / "a b"
    found = mount_of(place / "not" / "there", mountinfo=listed)
    assert found == Mount(device_of(tmp_path), str(place), "xfs", "/dev/a disk")


def test_nothing_is_known_where_nothing_is_listed(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").touch()
    assert mount_of(tmp_path, mountinfo=tmp_path / "mountinfo") is None
    assert mount_of(tmp_path, mountinfo=tmp_path / "missing") is None
    assert mount_of(tmp_path / "\0", mountinfo=tmp_path / "mountinfo") is None
