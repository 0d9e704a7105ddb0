"""The fake allocator keeps to the rules of PyTorch's, on which tests of device memory rely."""

from __future__ import annotations

import pytest
import torch

from tests.snapshot.fake_allocator import FakeAllocator


def test_freed_memory_stays_cached_and_is_used_again() -> None:
    memory = FakeAllocator(100)
    memory.release(memory.allocate(60))
    assert (memory.reserved, memory.allocated, memory.free) == (60, 0, 40)
    memory.allocate(50)
    assert (memory.reserved, memory.allocated, memory.flushes) == (60, 50, 0)


def test_the_smallest_piece_that_is_large_enough_is_taken() -> None:
    memory = FakeAllocator(100)
    large, small = memory.allocate(50), memory.allocate(20)
    memory.release(large)
    memory.release(small)
    memory.allocate(15)
    memory.allocate(50)
    assert (memory.reserved, memory.flushes) == (70, 0)


def test_a_driver_that_refuses_makes_it_flush_whole_segments() -> None:
    memory = FakeAllocator(100)
    memory.release(memory.allocate(60))
    memory.allocate(80)
    assert (memory.reserved, memory.allocated, memory.flushes) == (80, 80, 1)


def test_a_fragment_is_neither_given_back_nor_large_enough() -> None:
    memory = FakeAllocator(100)
    memory.release(memory.allocate(60))
    memory.allocate(10)  # cut from those 60
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(55)
    assert (memory.reserved, memory.allocated, memory.flushes, memory.ooms) == (60, 10, 1, 1)


def test_pieces_side_by_side_are_joined() -> None:
    memory = FakeAllocator(100)
    memory.release(memory.allocate(60))
    pieces = [memory.allocate(20) for _ in range(3)]
    for piece in pieces:
        memory.release(piece)
    memory.allocate(60)
    assert (memory.reserved, memory.flushes) == (60, 0)


def test_the_limit_of_the_process_counts_as_the_driver_does() -> None:
    memory = FakeAllocator(100)
    memory.limit = 50
    with pytest.raises(torch.OutOfMemoryError):
        memory.allocate(60)
    assert (memory.flushes, memory.ooms) == (1, 1)
    memory.allocate(50)


def test_peaks_are_kept_until_they_are_reset() -> None:
    memory = FakeAllocator(100)
    memory.release(memory.allocate(60))
    memory.flush()
    assert (memory.peak_reserved, memory.peak_allocated, memory.reserved) == (60, 60, 0)
    memory.reset_peaks()
    assert (memory.peak_reserved, memory.peak_allocated) == (0, 0)


def test_what_other_processes_take_is_not_free() -> None:
    memory = FakeAllocator(100)
    memory.allocate(30)
    memory.free = 10
    assert (memory.taken, memory.free) == (60, 10)
