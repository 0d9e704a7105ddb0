"""The writer: which bytes reach the payloads, at what rate, and what a failure stops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from xxhash import xxh3_64_hexdigest

from checkfreq.persist.writer import RateLimiter, SnapshotWriter
from tests.persist.conftest import PAGE, HandMadeSlot, file_image, round_up


class Payload:
    """Bytes in memory, in place of a file."""

    direct = True

    def __init__(self) -> None:
        self.data = bytearray()
        self.num_writes = 0
        self._lock = threading.Lock()

    def pwrite(self, view: memoryview, offset: int) -> None:
        with self._lock:
            self.num_writes += 1
            self.data.extend(bytes(max(0, offset + len(view) - len(self.data))))
            self.data[offset : offset + len(view)] = view


def a_copy_of(slot: HandMadeSlot) -> memoryview:
    """The slot's bytes. Copied, since the traceback of a failure keeps views of them alive."""
    return memoryview(bytearray(slot.memory[:]))


@pytest.fixture
def writer() -> Iterator[SnapshotWriter]:
    made = SnapshotWriter(num_threads=3, chunk_bytes=PAGE, limiter=RateLimiter(None))
    yield made
    made._pool.shutdown()


def test_all_bytes_are_written_and_digested(writer: SnapshotWriter, slot: HandMadeSlot) -> None:
    payloads = [Payload() for _ in slot.files]
    with memoryview(slot.memory) as view:
        result = writer.write(slot.files, view, payloads)
    for file, payload in zip(slot.files, payloads, strict=True):
        image = slot.memory[file.slot_offset : file.slot_offset + file.num_bytes]
        assert payload.data[: file.num_bytes] == image
        assert len(payload.data) == round_up(file.num_bytes)  # the caller truncates
        assert payload.num_writes == len(payload.data) // PAGE
    assert result.direct
    for file, entry in zip(slot.files, result.files, strict=True):
        image = slot.memory[file.slot_offset : file.slot_offset + file.num_bytes]
        assert (entry.name, entry.num_bytes) == (file.name, file.num_bytes)
        assert entry.header_digest == xxh3_64_hexdigest(image[: file.header_bytes])
        for tensor in entry.tensors:
            data = image[tensor.offset : tensor.offset + tensor.num_bytes]
            assert tensor.digest == xxh3_64_hexdigest(data)
    assert [t.name for t in result.files[0].tensors] == ["a", "b", "c"]


def test_each_piece_of_a_tensor_is_digested(writer: SnapshotWriter) -> None:
    file, image = file_image("cut.safetensors", 0, {"a": 33 << 20, "b": 5, "c": 7001})
    a, b, c = file.tensors
    cut = (replace(a, piece_bytes=1 << 20), b, replace(c, piece_bytes=1000))
    memory = bytearray(round_up(len(image)))
    memory[: len(image)] = image
    (entry,) = writer.write([replace(file, tensors=cut)], memoryview(memory), [Payload()]).files
    for tensor, count in zip(entry.tensors, (33, 1, 8), strict=True):
        data = image[tensor.offset : tensor.offset + tensor.num_bytes]
        size = tensor.piece_bytes or len(data)
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert tensor.digest == "".join(map(xxh3_64_hexdigest, pieces))
        assert len(pieces) == count


def test_a_failure_stops_threads_that_wait_for_their_turn(slot: HandMadeSlot) -> None:
    entered, failed = threading.Event(), threading.Event()

    class Slow(Payload):
        def pwrite(self, view: memoryview, offset: int) -> None:
            if offset == 0:
                entered.set()
                assert failed.wait(120.0)
            super().pwrite(view, offset)

    class Fails(Payload):
        def pwrite(self, view: memoryview, offset: int) -> None:
            assert entered.wait(120.0)
            failed.set()
            raise OSError(5, "Input/output error")

    slow = Slow()
    writer = SnapshotWriter(num_threads=4, chunk_bytes=PAGE, limiter=RateLimiter(None))
    with pytest.raises(OSError, match="Input/output"):
        writer.write(slot.files, a_copy_of(slot), [slow, Fails()])
    before = slow.num_writes
    writer._pool.shutdown()
    assert slow.num_writes == before


# ---- the rate


class Lifted(threading.Event):
    """Notes how long each caller would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        return False


def test_bytes_are_spaced_and_idle_time_does_not_allow_a_burst_later() -> None:
    now_s, lifted = [0.0], Lifted()
    limiter = RateLimiter(100, clock=lambda: now_s[0])
    limiter._lifted = lifted
    for now_s[0] in (0.0, 10.0, 10.0, 10.0):
        limiter.wait_for(50)
    assert lifted.waits == [0.0, 0.0, 0.5, 1.0]
    limiter.lift()
    limiter.wait_for(1 << 40)
    assert len(lifted.waits) == 4


def test_lifting_the_limit_wakes_waiting_threads() -> None:
    limiter = RateLimiter(1)
    limiter.wait_for(1 << 30)  # the next byte may start in 34 years
    waiter = threading.Thread(target=limiter.wait_for, args=(1,))
    waiter.start()
    limiter.lift()
    waiter.join(30.0)
    assert not waiter.is_alive()
