"""A snapshot and a restore without arena, worker or disk: copies like an engine, but at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from checkfreq.restore.apply import RestorePlan, prepare
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.snapshot.layout import StateLayout
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState
from checkfreq.types import FileSpec
from tests.restore.memory import MemoryReader


@dataclass
class Record:
    """What a manifest would say."""

    objects: dict[str, Any]
    files: Sequence[FileSpec] = ()
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Shot:
    """A checkpoint and the memory that it lies in."""

    found: FoundCheckpoint
    data: dict[str, memoryview]
    slot: Tensor
    layout: StateLayout
    captured: CapturedState

    def image(self, object_name: str) -> bytes:
        return bytes(self.data[f"{object_name}.safetensors"])

    def overwrite(self) -> None:
        """What the next snapshot does to the arena."""
        self.slot.fill_(0xA5)


def take(chk: CFCheckpoint, **kwargs: Any) -> Shot:
    captured = capture(chk, **kwargs)
    layout = StateLayout.plan(captured)
    slot = torch.full((layout.total_bytes,), 0x5A, dtype=torch.uint8, device="cpu")
    for i, file in enumerate(layout.files):
        header = torch.frombuffer(bytearray(layout.header(i)), dtype=torch.uint8)
        slot[file.slot_offset : file.slot_offset + file.header_bytes] = header
    for view, ref in zip(layout.views(slot), captured.tensors, strict=True):
        view.copy_(ref.tensor)
    memory = memoryview(slot.numpy())
    data = {
        file.name: memory[file.slot_offset : file.slot_offset + file.num_bytes]
        for file in layout.files
    }
    record = Record(json.loads(json.dumps(captured.objects)), layout.files)
    found = FoundCheckpoint(record, (), MemoryReader(data))
    return Shot(found, data, slot, layout, captured)


def plan(chk: CFCheckpoint, shot: Shot, **kwargs: Any) -> RestorePlan:
    return prepare(chk, shot.found, path="chk/step-00000003", **kwargs)


def restore(chk: CFCheckpoint, shot: Shot, **kwargs: Any) -> RestorePlan:
    """Restore, then reuse the memory at once: whoever still aliases it fails."""
    restored = plan(chk, shot, **kwargs)
    restored.apply()
    shot.overwrite()
    restored.apply_rng()
    return restored


def bits(value: Any) -> Any:
    """A value in which tensors are replaced by everything that must be equal about them."""
    if isinstance(value, Tensor):
        tensor = value.detach().resolve_conj().contiguous().cpu()
        data = bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        return (str(tensor.dtype), tuple(tensor.shape), data)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(bits(item) for item in value)]
    return value


def state_bits(chk: CFCheckpoint) -> Any:
    """Bits of everything tracked."""
    return {
        name: bits(value if isinstance(value, dict) else value.state_dict())
        for name, value in chk.tracked.items()
    }
