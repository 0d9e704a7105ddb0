"""The ranks that a helper works with: those of torch.distributed, or this process alone."""

from __future__ import annotations

import sys
from typing import Any, Protocol, TypeVar

_Value = TypeVar("_Value")


class Group(Protocol):
    """Ranks that meet. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world(self) -> int:
        """The number of ranks."""

    def gather(self, value: _Value) -> list[_Value]:
        """Everyone's value, in the order of the ranks, on every rank."""


class Alone:
    """A group of this process only."""

    rank = 0
    world = 1

    def gather(self, value: _Value) -> list[_Value]:
        """See Group."""
        return [value]


class ProcessGroup:
    """The default process group of torch.distributed. Values are pickled, by torch."""

    @property
    def rank(self) -> int:
        """See Group."""
        import torch.distributed as dist

        return dist.get_rank()

    @property
    def world(self) -> int:
        """See Group."""
        import torch.distributed as dist

        return dist.get_world_size()

    def gather(self, value: _Value) -> list[_Value]:
        """See Group."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


def current_group() -> Group:
    """The process group if there is one by now. If nobody has imported torch, there is none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return Alone()
    return ProcessGroup() if torch.distributed.is_initialized() else Alone()
