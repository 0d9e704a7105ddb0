"""Who hands words to whom: the ranks of a run as a tree. Pure.

Every node heads a block of successive ranks and is the first of it, so that words are joined in the
order of the ranks. Up to ``FAN_IN + 1`` ranks are a star around rank 0. Above that the tree is as
low as ``FAN_IN`` allows, and of that height as narrow as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

#: How many words a rank joins with its own, at most. More of them cost their parent time, fewer a
#: level more, which is two round trips to the store. Compared with 8 and 32 on two cores
#: (`benchmarks.ranks --fan-in 8 16 32`, 2026-11): among 64 ranks no difference; among hundreds 8
#: takes longer, 32 less long but more of rank 0. Three levels take 4,369 ranks.
FAN_IN = 16


@dataclass(frozen=True, slots=True)
class Node:
    """A rank's place: it heads ``block``, which it and its ``children``'s blocks make up.

    ``children`` are blocks too, in order: the first rank of each hands its word to this one.
    """

    block: range
    children: tuple[range, ...]

    @property
    def heads(self) -> list[int]:
        """The ranks whose words this one joins with its own."""
        return [block.start for block in self.children]


class Tree:
    """The nodes of ``world`` ranks, each computed when it is asked for."""

    def __init__(self, world: int, *, fan_in: int = FAN_IN) -> None:
        self._world = world
        self._fan = _narrowest(world, fan_in)

    def node(self, rank: int) -> Node:
        """The place of a rank; rank 0 heads all."""
        block = range(self._world)
        while block.start != rank:
            block = next(child for child in self._children(block) if rank in child)
        return Node(block, tuple(self._children(block)))

    def _children(self, block: range) -> Sequence[range]:
        """The blocks below the head of a block: of equal size, but for one rank."""
        others = block[1:]
        number = min(self._fan, len(others))
        cuts = [len(others) * cut // number for cut in range(number + 1)] if number else [0]
        return [others[low:high] for low, high in pairwise(cuts)]


def _narrowest(world: int, fan_in: int) -> int:
    """The smallest number of children with which a tree is no higher than with ``fan_in``."""
    height = next(h for h in range(world) if _room(fan_in, h) >= world) if world > 1 else 0
    if height <= 1:
        return fan_in
    return next(fan for fan in range(1, fan_in + 1) if _room(fan, height) >= world)


def _room(fan: int, height: int) -> int:
    """How many ranks a tree of this height has room for."""
    return sum(fan**level for level in range(height + 1))
