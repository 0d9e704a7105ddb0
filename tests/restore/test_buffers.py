"""Memory for reads, and targets in host memory."""

from __future__ import annotations

import ctypes

import pytest

from checkfreq.errors import StorageError
from checkfreq.restore.buffers import (
    HostBuffers,
    MemoryTarget,
    address_of,
    buffer_bytes,
    finish,
    new_buffer,
)
from checkfreq.types import PAGE_BYTES


@pytest.mark.parametrize("num_bytes", [1 << 62, 1 << 80])
def test_files_larger_than_any_memory_are_refused_with_a_sentence(num_bytes: int) -> None:
    with pytest.raises(StorageError, match=f"reading needs {num_bytes} bytes of memory"):
        new_buffer(num_bytes)


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES, 3 * PAGE_BYTES + 1, 5 << 20])
def test_a_new_buffer_is_aligned_writable_and_large_enough(num_bytes: int) -> None:
    buffer = new_buffer(num_bytes)
    assert len(buffer) >= max(num_bytes, 1)
    buffer[:1] = b"x"
    # From a MiB on it begins where a huge page can.
    assert address_of(buffer) % ((2 << 20) if num_bytes > 1 << 20 else PAGE_BYTES) == 0


def test_the_buffer_that_was_given_back_is_taken_again_after_its_copies() -> None:
    buffers = HostBuffers(2 * PAGE_BYTES)
    one, other = buffers.take(), buffers.take()
    assert one is not other
    assert len(one) == buffer_bytes(2 * PAGE_BYTES)
    waited: list[str] = []
    buffers.give(one, [lambda: waited.append("copy")])
    assert waited == ["copy"]
    assert buffers.take() is one


def test_every_wait_is_called_in_order_whatever_the_others_raise() -> None:
    called: list[int] = []

    def fail() -> None:
        called.append(2)
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        finish([lambda: called.append(1), fail, lambda: called.append(3)])
    assert called == [1, 2, 3]


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE_BYTES, 1 << 20])
@pytest.mark.parametrize("is_readonly", [False, True])
def test_bytes_of_any_length_are_put_where_they_belong(num_bytes: int, is_readonly: bool) -> None:
    place = bytearray(num_bytes + 2)
    data = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    source = memoryview(data if is_readonly else bytearray(data))
    MemoryTarget.of(memoryview(place)).put(1, source)
    assert place == b"\0" + data + b"\0"


def test_a_target_can_be_given_by_its_address() -> None:
    place = ctypes.create_string_buffer(4)
    MemoryTarget(ctypes.addressof(place), 4, keep=place).put(1, memoryview(b"ab"))
    assert place.raw == b"\0ab\0"


@pytest.mark.parametrize("num_bytes", [2, 1 << 20])
def test_nothing_is_put_beyond_the_end_of_a_target(num_bytes: int) -> None:
    place = bytearray(2 * num_bytes)
    target = MemoryTarget.of(memoryview(place)[:num_bytes])
    with pytest.raises(ValueError, match="different"):
        target.put(1, memoryview(b"x" * num_bytes))
    assert not any(place)
