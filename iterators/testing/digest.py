"""A digest of the bits of any batch, for tests that compare what was served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np


def digest(data: object) -> str:
    """A digest of the bits of a batch: tensors, arrays, containers, dataclasses, plain values.

    Any other value is digested through its ``repr``, which must not contain its address.
    """
    state = blake2b(digest_size=16)
    _feed(state.update, data)
    return state.hexdigest()


def _feed(update: Callable[[bytes], None], data: Any) -> None:
    if isinstance(data, (np.ndarray, np.generic)):
        update(f"array {data.dtype} {data.shape}".encode())
        update(data.tobytes())
        return
    if hasattr(data, "untyped_storage"):
        update(f"tensor {data.dtype} {tuple(data.shape)}".encode())
        update(_bytes_of_tensor(data))
        return
    update(f"{type(data).__name__}(".encode())
    for part in _parts(data):
        _feed(update, part)
    update(b")")


def _parts(data: Any) -> list[Any]:
    """The parts of a container; for any other value the text of its ``repr``."""
    if isinstance(data, Mapping):
        return [part for item in data.items() for part in item]
    if isinstance(data, (list, tuple)):
        return list(data)
    if is_dataclass(data) and not isinstance(data, type):
        return [getattr(data, one.name) for one in fields(data)]
    return [] if data is None else [np.frombuffer(repr(data).encode(), dtype=np.uint8)]


def _bytes_of_tensor(tensor: Any) -> bytes:
    import torch  # here, since this module must import without torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).view(torch.uint8)
    content: bytes = flat.numpy().tobytes()
    return content
