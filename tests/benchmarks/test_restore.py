"""What `benchmarks.restore` says of memory is what the kernel says."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.restore.arms import LOAD, OURS, RAW
from benchmarks.restore.measure import Figures, is_met
from benchmarks.restore.memory import Group, PrivatePeak, Resident, forget_peak
from benchmarks.restore.table import restore
from tests.fork_server import FORK_SERVER

MIB = 1 << 20
OTHER = "dcp.load"
LINE: dict[str, Any] = {
    **{"gib": 1.0, "tensors": 64, "device": "cpu", "memory": "short"},
    **{"seconds": 0.5, "low": 0.25, "high": 0.75, "against_raw": 1.25, "peak_mib": 17.5},
    **{"command": "python -m benchmarks.restore", "commit": "abc1234"},
    "machine": {"cores": 2, "accelerator": None},
    "versions": {"torch": "2.13.0"},
}


def test_the_peak_is_of_what_came_after_it_was_forgotten() -> None:
    touch(64 * MIB)
    forget_peak()
    before = Resident.read()
    touch(32 * MIB)
    after = Resident.read()
    assert before.peak < before.now + 8 * MIB
    assert 24 * MIB < after.peak - before.now < 56 * MIB


def test_the_private_peak_is_without_memory_that_is_shared() -> None:
    process = FORK_SERVER.Process(target=check_private_peak)
    process.start()
    process.join(120.0)
    assert process.exitcode == 0


def check_private_peak() -> None:
    """In a process of its own: one that has run tests holds freed memory, which it uses again."""
    num_private = 32 * MIB
    with mmap.mmap(-1, 64 * MIB) as shared, PrivatePeak() as peak:
        before = peak.num_bytes
        for start in range(0, len(shared), mmap.PAGESIZE):
            shared[start] = 1
        with mmap.mmap(-1, num_private, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as private:
            for start in range(0, num_private, mmap.PAGESIZE):
                private[start] = 1
            deadline_s = time.monotonic() + 60.0
            while peak.num_bytes < before + num_private and time.monotonic() < deadline_s:
                threading.Event().wait(0.002)
    assert 31 * MIB < peak.num_bytes - before < 48 * MIB


def test_a_process_that_needs_more_than_its_group_leaves_is_killed() -> None:
    name = f"checkfreq-test-{os.getpid()}"
    try:
        group = Group.make(name)
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        assert status_of(name, 16 * MIB) == 0
        assert status_of(name, 256 * MIB) == -9
    finally:
        group.remove()
    assert not any(Path("/sys/fs/cgroup").glob(f"**/{name}"))


def status_of(name: str, num_bytes: int) -> int | None:
    process = FORK_SERVER.Process(target=in_group, args=(name, num_bytes))
    process.start()
    process.join(60.0)
    return process.exitcode


def in_group(name: str, num_bytes: int) -> None:
    group = Group.make(name)
    group.join()
    group.leave_only(64 * MIB)
    touch(num_bytes)


def touch(num_bytes: int) -> None:
    """Use that much memory, and give it back."""
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for start in range(0, num_bytes, mmap.PAGESIZE):
            memory[start] = 1


@pytest.mark.parametrize(
    ("ours", "other", "expected"),
    [
        (Figures([1.25], [MIB]), Figures([1.5], [0]), True),
        (Figures([1.35], [MIB]), Figures([1.5], [0]), False),  # of raw
        (Figures([1.25], [MIB]), Figures([1.125], [0]), False),
        (Figures([1.25], [65 * MIB]), Figures([1.5], [0]), False),
        (Figures([1.25], [MIB]), Figures(failed="killed"), True),
        (Figures(failed="killed"), Figures([1.5], [0]), False),
    ],
)
def test_ours_meets_its_target_where_time_order_and_memory_do(
    ours: Figures, other: Figures, expected: bool
) -> None:
    found = {RAW: Figures([1.0], [0]), OURS: Figures([9.0], [0]), LOAD: ours, OTHER: other}
    assert is_met(LOAD, found) is expected


def test_the_table_has_the_raw_read_first_and_what_failed_last() -> None:
    failed = {name: LINE[name] for name in LINE if name not in ("seconds", "low", "high")}
    lines = [{**failed, "arm": OTHER, "failed": "killed"}, {**LINE, "arm": OURS}]
    rows = restore([*lines, {**LINE, "arm": RAW, "against_raw": 1.0}])
    assert [text for text in rows.splitlines() if text.startswith("| 1 GiB")] == [
        "| 1 GiB | short | raw | 0.50 s (0.25 to 0.75) | 1.00 | - |",
        "| 1 GiB | short | checkfreq, restore() | 0.50 s (0.25 to 0.75) | 1.25 | 18 MiB |",
        "| 1 GiB | short | dcp.load | killed | - | - |",
    ]
