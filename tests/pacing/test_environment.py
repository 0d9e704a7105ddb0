"""The environment that a cached profile is valid for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

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


def test_they_name_machine_storage_and_versions(tmp_path: Path) -> None:
    found = environment(tmp_path)
    assert found["devices"] == []  # none is in use in this process
    assert found["cores"] == num_cores() == len(os.sched_getaffinity(0))
    assert found["threads"] == torch.get_num_threads()
    assert found["storage"] != UNKNOWN
    assert (found["checkfreq"], found["torch"]) == (__version__, torch.__version__)
    assert found["python"].count(".") == 1


# ---- processor


def test_a_processor_is_known_by_its_name_or_its_architecture(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert cpu_model(cpuinfo) == os.uname().machine
    cpuinfo.write_text("processor\t: 0\nmodel\t\t: 106\nmodel name\t: Fast CPU @ 2 GHz \n" * 2)
    assert cpu_model(cpuinfo) == "Fast CPU @ 2 GHz"


# ---- storage


@pytest.mark.parametrize(
    ("mounts", "found"),
    [
        pytest.param(
            [("99:7", "/", "ext4 /dev/vda rw"), ("HERE", "/", "xfs /dev/nvme0n1p1 rw,attr2")],
            "xfs /dev/nvme0n1p1 ",
            id="by the number of its device",
        ),
        pytest.param(
            [("0:48", "DIR", "nfs4 server:/export rw")],
            "nfs4 server:/export 0",
            id="without a number that is given out at each mount",
        ),
        pytest.param(
            [
                ("99:1", "/", "ext4 /dev/vda rw"),
                ("99:2", "PARENT", "btrfs /dev/vdb rw,subvol=/runs"),
                ("99:3", "DIR-other", "ext4 /dev/vdc rw"),
            ],
            "btrfs /dev/vdb 99:2",
            id="by its mount point, where numbers are the file system's own",
        ),
        pytest.param(
            [("99:1", "DIR", "ext4 /dev/vda rw"), ("99:2", "DIR", "xfs /dev/vdb rw")],
            "xfs /dev/vdb 99:2",
            id="by the mount that hides another",
        ),
        pytest.param(
            [("HERE", "/elsewhere", "ext4 /dev/disk\\040one rw")],
            "ext4 /dev/disk one ",
            id="by its device, mounted elsewhere only",
        ),
    ],
)
def test_storage_is_type_source_and_number_of_the_mounted_device(
    tmp_path: Path, mounts: list[tuple[str, str, str]], found: str
) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    places = {"PARENT": str(tmp_path), "DIR": str(folder), "DIR-other": f"{folder}-other"}
    lines = [
        line(
            device_of(folder) if device == "HERE" else device,
            places.get(point, point).replace(" ", "\\040"),
            rest,
        )
        for device, point, rest in mounts
    ]
    file = mountinfo_of(tmp_path, *lines, "")
    assert storage_of(folder, mountinfo=file).startswith(found)
    assert storage_of(folder / "not" / "yet", mountinfo=file) == storage_of(folder, mountinfo=file)


def test_storage_is_unknown_where_nothing_tells(tmp_path: Path) -> None:
    assert storage_of(tmp_path, mountinfo=tmp_path / "missing") == UNKNOWN
    assert storage_of(tmp_path, mountinfo=mountinfo_of(tmp_path, "36 35 - ext4")) == UNKNOWN
    assert storage_of(Path("x\0y")) == UNKNOWN
