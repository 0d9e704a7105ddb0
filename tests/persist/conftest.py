"""A slot with two files laid out by hand: the worker's tests need no torch."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from checkfreq.config import CFConfig
from checkfreq.persist import protocol as p
from checkfreq.persist.client import WorkerClient
from checkfreq.types import FileSpec, TensorSpec

PAGE = 4096


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


class HandMadeSlot:
    """A memfd that holds the images of ``files``, one after another."""

    def __init__(self, files: Sequence[tuple[str, dict[str, int]]]) -> None:
        specs, self.images, at = [], dict[str, bytes](), 0
        for name, sizes in files:
            spec, self.images[name] = file_image(name, at, sizes)
            specs.append(spec)
            at += round_up(spec.num_bytes)
        self.files = tuple(specs)
        self.fd = os.memfd_create("slot")
        os.ftruncate(self.fd, at)
        self.memory = mmap.mmap(self.fd, at)
        for spec in specs:
            end = spec.slot_offset + spec.num_bytes
            self.memory[spec.slot_offset : end] = self.images[spec.name]

    def share(self, client: WorkerClient) -> None:
        """Share memory and layout as the slot 0."""
        client.share_slot(0, fd=self.fd, num_bytes=len(self.memory))
        client.lay_out_slot(0, self.files)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


@pytest.fixture
def slot() -> Iterator[HandMadeSlot]:
    made = HandMadeSlot(
        [
            ("model.safetensors", {"a": 10_000, "b": 3, "c": 0}),
            ("optimizer.safetensors", {"d": 5000}),
        ]
    )
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path, slot: HandMadeSlot) -> Iterator[WorkerClient]:
    """A started client that knows the slot."""
    handle = WorkerClient(tmp_path / "chk", config=CFConfig(takeover_s=120.0))
    handle.start()
    handle.wait_opened()
    slot.share(handle)
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
