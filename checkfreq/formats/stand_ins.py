"""Tensors whose bytes are still in a file: stand-ins with their dtype and shape take their places.

So a state is described as a whole, and its tensors are read and written one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class StandIns:
    """The stand-ins of one conversion, and what reads the tensors that they stand for."""

    def __init__(self) -> None:
        #: By address; the stand-ins are kept, so that no address is used again.
        self._reads: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def make(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Tensor]) -> Tensor:
        """A CPU tensor of that shape and dtype, with memory for one element."""
        if 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        made = torch.empty((), dtype=dtype, device="cpu").expand(tuple(shape))
        self._reads[made.data_ptr()] = made, read
        return made

    def real(self, tensor: Tensor) -> Tensor:
        """What a stand-in stands for, read now; any other tensor as it is."""
        found = self._reads.get(tensor.data_ptr()) if tensor.numel() else None
        return tensor if found is None else found[1]()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, row by row."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.numel():
        return memoryview(b"")
    array: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bytes_of(one) == bytes_of(other)
