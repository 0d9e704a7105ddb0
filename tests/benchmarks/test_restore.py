"""What `benchmarks.restore` says of memory is what the kernel says."""

from __future__ import annotations

import mmap

import pytest

from benchmarks.restore.arms import LOAD, OURS, RAW
from benchmarks.restore.measure import Figures, is_met
from benchmarks.restore.memory import Resident, forget_peak

MIB = 1 << 20
OTHER = "dcp.load"


def test_the_peak_is_of_what_came_after_it_was_forgotten() -> None:
    touch(64 * MIB)
    forget_peak()
    before = Resident.read()
    touch(32 * MIB)
    after = Resident.read()
    assert before.peak < before.now + 8 * MIB
    assert 24 * MIB < after.peak - before.now < 56 * MIB


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
