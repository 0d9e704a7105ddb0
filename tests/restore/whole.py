"""All tensors of a checkpoint, read as a restore reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.restorer import Restorer
from checkfreq.state.saved_tensor import Chunk, Placement
from checkfreq.state.tensors import DTYPES
from checkfreq.store.boxes import Box


def contents(found: FoundCheckpoint) -> dict[str, bytes]:
    """By file, the bytes of its tensors, one after another; everything is verified."""
    tensors: dict[str, list[Tensor]] = {}
    placements = []
    for file in found.manifest.files:
        for entry in file.in_file_order():
            box = Box.whole(entry.shape)
            target = torch.empty(tuple(entry.shape), dtype=DTYPES[entry.dtype])
            tensors.setdefault(file.name, []).append(target)
            if box.num_elements:
                placements.append(Placement(Chunk(box, file, entry), box, target))
    found.reader.read(placements)
    return {name: b"".join(map(_bytes, found)) for name, found in tensors.items()}


def find(restorer: Restorer, step: int | None = None) -> FoundCheckpoint | None:
    """``step``, or the newest checkpoint, of which every byte is right."""
    done = restorer.find(step, contents)
    return None if done is None else done[0]


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())
