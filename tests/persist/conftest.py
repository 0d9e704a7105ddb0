"""A slot with two files laid out by hand: the worker's tests need no torch."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkfreq.config import CFConfig
from checkfreq.persist import protocol as p
from checkfreq.persist.client import WorkerClient
from checkfreq.types import FileSpec, TensorSpec

PAGE = 4096


@dataclass
class HandMadeSlot:
    """A memfd that holds the images of ``files``."""

    fd: int
    memory: mmap.mmap
    files: tuple[FileSpec, ...]


def file_image(name: str, slot_offset: int, sizes: dict[str, int]) -> tuple[FileSpec, bytes]:
    """A safetensors image of byte tensors, filled with the first letter of their names."""
    tensors, header, at = [], {}, PAGE
    for tensor, size in sizes.items():
        tensors.append(TensorSpec(tensor, "uint8", (size,), at, size))
        header[tensor] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [at - PAGE, at - PAGE + size],
        }
        at += size
    text = json.dumps(header).encode().ljust(PAGE - 8)
    image = (PAGE - 8).to_bytes(8, "little") + text
    image += b"".join(t.encode()[:1] * size for t, size in sizes.items())
    return FileSpec(name, slot_offset, at, PAGE, tuple(tensors)), image


def round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


@pytest.fixture
def slot() -> Iterator[HandMadeSlot]:
    first, first_image = file_image("model.safetensors", 0, {"a": 10_000, "b": 3, "c": 0})
    second, second_image = file_image(
        "optimizer.safetensors", round_up(first.num_bytes), {"d": 5000}
    )
    size = second.slot_offset + round_up(second.num_bytes)
    fd = os.memfd_create("slot")
    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as memory:
        memory[: len(first_image)] = first_image
        memory[second.slot_offset : second.slot_offset + len(second_image)] = second_image
        yield HandMadeSlot(fd, memory, (first, second))
    os.close(fd)


@pytest.fixture
def client(tmp_path: Path, slot: HandMadeSlot) -> Iterator[WorkerClient]:
    """A started client that knows the slot."""
    handle = WorkerClient(tmp_path / "chk", config=CFConfig(takeover_s=120.0))
    handle.start()
    handle.wait_opened()
    handle.share_slot(0, fd=slot.fd, num_bytes=len(slot.memory))
    handle.lay_out_slot(0, slot.files)
    yield handle
    handle.kill()


def request(step: int, **changes: object) -> p.Persist:
    """A request to persist slot 0."""
    fields: dict[str, object] = {
        "attempt": f"attempt{step}",
        "step": step,
        "slot": 0,
        "objects": {"scheduler": {"last_epoch": step}},
        "world": 1,
        "versions": {"torch": "none"},
        "metrics": {},
    }
    return p.Persist(**{**fields, **changes})  # type: ignore[arg-type]


def next_reply(client: WorkerClient) -> p.Message:
    """The worker's next reply, within a generous deadline."""
    reply = client.poll(timeout_s=120.0)
    assert reply is not None, "the worker did not answer within 30 s"
    return reply
