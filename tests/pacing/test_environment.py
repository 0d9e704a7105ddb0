"""The environment that a cached profile is valid for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkfreq import __version__
from checkfreq.pacing.environment import UNKNOWN, cpu_model, environment, num_cores, storage_of


def device_of(path: Path) -> str:
    number = os.stat(path).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def mountinfo_of(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "mountinfo"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def line(device: str, point: object, rest: str) -> str:
    return f"36 35 {device} / {point} rw,noatime shared:1 - {rest}"


# ---- all of it


def test_they_are_json_and_the_same_each_time(tmp_path: Path) -> None:
    found = environment(tmp_path)
    assert json.loads(json.dumps(found)) == found == environment(tmp_path)


def test_they_name_machine_storage_and_versions(tmp_path: Path) -> None:
    found = environment(tmp_path)
    assert found["devices"] == []  # none is in use in this process
    assert found["cores"] == num_cores() == len(os.sched_getaffinity(0))
    assert found["threads"] == torch.get_num_threads()
    assert found["storage"] != UNKNOWN
    assert (found["checkfreq"], found["torch"]) == (__version__, torch.__version__)
    assert found["python"].count(".") == 1


# ---- processor


def test_a_processor_is_known_by_its_model_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 106\nmodel name\t: Fast CPU @ 2 GHz \n" * 2)
    assert cpu_model(cpuinfo) == "Fast CPU @ 2 GHz"


@pytest.mark.parametrize("text", [None, "", "model name\t:\n", "CPU part : 0xd0c\n"])
def test_a_processor_without_a_name_is_known_by_its_architecture(
    tmp_path: Path, text: str | None
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    if text is not None:
        cpuinfo.write_text(text)
    assert cpu_model(cpuinfo) == os.uname().machine


# ---- storage


def test_storage_is_type_source_and_number_of_the_mounted_device(tmp_path: Path) -> None:
    file = mountinfo_of(
        tmp_path,
        line("99:7", "/", "ext4 /dev/vda rw"),
        line(device_of(tmp_path), "/", "xfs /dev/nvme0n1p1 rw,attr2"),
    )
    assert storage_of(tmp_path, mountinfo=file).startswith("xfs /dev/nvme0n1p1 ")


def test_a_directory_that_is_not_there_yet_lies_where_its_parent_does(tmp_path: Path) -> None:
    assert storage_of(tmp_path / "not" / "yet") == storage_of(tmp_path)


def test_a_device_number_that_is_given_out_at_each_mount_is_left_out(tmp_path: Path) -> None:
    file = mountinfo_of(tmp_path, line("0:48", tmp_path, "nfs4 server:/export rw"))
    assert storage_of(tmp_path, mountinfo=file) == "nfs4 server:/export 0"


def test_a_file_system_with_numbers_of_its_own_is_found_by_its_mount_point(tmp_path: Path) -> None:
    file = mountinfo_of(
        tmp_path,
        line("99:1", "/", "ext4 /dev/vda rw"),
        line("99:2", tmp_path.parent, "btrfs /dev/vdb rw,subvol=/runs"),
        line("99:3", f"{tmp_path}-other", "ext4 /dev/vdc rw"),
    )
    assert storage_of(tmp_path, mountinfo=file) == "btrfs /dev/vdb 99:2"


def test_a_mount_that_hides_another_counts(tmp_path: Path) -> None:
    file = mountinfo_of(
        tmp_path,
        line("99:1", tmp_path, "ext4 /dev/vda rw"),
        line("99:2", tmp_path, "xfs /dev/vdb rw"),
        "",
    )
    assert storage_of(tmp_path, mountinfo=file) == "xfs /dev/vdb 99:2"


def test_a_device_mounted_elsewhere_only_is_still_that_device(tmp_path: Path) -> None:
    device = device_of(tmp_path)
    file = mountinfo_of(tmp_path, line(device, "/elsewhere", "ext4 /dev/disk\\040one rw"))
    assert storage_of(tmp_path, mountinfo=file).startswith("ext4 /dev/disk one ")


def test_a_mount_point_with_spaces_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "my runs"
    path.mkdir()
    file = mountinfo_of(
        tmp_path,
        line("99:1", tmp_path, "ext4 /dev/vda rw"),
        line("99:2", str(path).replace(" ", "\\040"), "xfs /dev/vdb rw"),
    )
    assert storage_of(path, mountinfo=file) == "xfs /dev/vdb 99:2"


def test_storage_is_unknown_where_nothing_tells(tmp_path: Path) -> None:
    assert storage_of(tmp_path, mountinfo=tmp_path / "missing") == UNKNOWN
    assert storage_of(tmp_path, mountinfo=mountinfo_of(tmp_path, "36 35 - ext4")) == UNKNOWN
    assert storage_of(Path("x\0y")) == UNKNOWN


def test_links_in_a_circle_are_not_followed_forever(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert storage_of(tmp_path / "a" / "chk") in (UNKNOWN, storage_of(tmp_path))


@given(text=st.text(alphabet="0:1 -/ab\\40\n", max_size=60) | st.text(max_size=30))
def test_whatever_the_kernel_writes_nothing_fails(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    file = tmp_path_factory.getbasetemp() / "mountinfo"
    file.write_text(text, errors="replace")
    assert storage_of(file.parent, mountinfo=file)
