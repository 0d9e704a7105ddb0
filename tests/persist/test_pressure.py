"""Memory is given up when others need it, as far as the kernel tells."""

from __future__ import annotations

import os
from pathlib import Path

from checkfreq.persist.pressure import MemoryPressure, first_to_go, pressure_files

MIB = 1 << 20


def test_memory_is_short_below_a_sixteenth_of_what_is_held() -> None:
    left = [200 * MIB]
    pressure = MemoryPressure(4096 * MIB, available=lambda: left[0], files=[])
    assert pressure.is_short()
    left[0] = 300 * MIB
    assert not pressure.is_short()


def test_a_pressure_file_is_told_what_to_watch_for(tmp_path: Path) -> None:
    file = tmp_path / "memory.pressure"
    file.write_bytes(b"")
    pressure = MemoryPressure(1, files=[file, tmp_path / "missing"])
    assert file.read_text() == "some 300000 2000000"
    assert len(pressure.filenos()) == 1
    pressure.close()
    assert pressure.filenos() == ()


def test_the_files_are_those_of_the_machine_and_of_the_own_group(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("1:memory:/old\n0::/jobs/one\n")
    assert pressure_files(tmp_path / "cgroup") == [
        Path("/proc/pressure/memory"),
        Path("/sys/fs/cgroup/jobs/one/memory.pressure"),
    ]
    assert pressure_files(tmp_path / "missing") == [Path("/proc/pressure/memory")]


def test_the_kernel_is_asked_to_end_this_process_first_and_no_longer(tmp_path: Path) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text("7")
    with first_to_go(score):
        assert score.read_text() == "1000"
    assert score.read_text() == "7"
    with first_to_go(tmp_path / "missing" / "file"):
        pass
    assert os.listdir(tmp_path) == ["oom_score_adj"]
