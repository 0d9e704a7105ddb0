"""Whether the shards of all ranks tile each tensor, told from one number per rank. Pure.

A box of a tensor with dimensions ``d`` is given the polynomial ``sum of prod x_d ** i_d`` over its
elements ``i``, evaluated at a fixed point modulo a prime. It is a product of geometric series, so a
box of any size takes a few multiplications. Boxes tile a tensor exactly if, and but for a chance
below 2 ** -80 only if, theirs add up to that of the whole: a gap, an overlap, or an element that is
covered twice while another is missing changes the sum (Schwartz and Zippel's lemma; the degree of
the polynomial is at most the sum of the tensor's sizes). Each tensor has a weight of its own, made
of its name, dtype and shape, so that one sum stands for all tensors, and ranks that do not agree on
any of these do not add up either.

So the sum over the shards of all ranks is compared with the sum over the tensors that the leader
lists. The point is fixed: this finds mistakes, not someone who makes them on purpose, and readers
do not rely on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import NamedTuple

from xxhash import xxh3_128_intdigest

from checkfreq.store.boxes import Box

_PRIME = (1 << 127) - 1


class Shard(NamedTuple):
    """A box of a tensor: the tracked object's name, the tensor's key, dtype and whole shape."""

    name: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @classmethod
    def whole(cls, name: str, key: str, dtype: str, shape: tuple[int, ...]) -> Shard:
        """All of a tensor."""
        return cls(name, key, dtype, shape, Box.whole(shape))


def measure(shards: Iterable[Shard]) -> int:
    """What shards add to the sum."""
    return sum(_weight(shard) * _value(shard.box) for shard in shards) % _PRIME


def add_up(parts: Iterable[int], whole: int) -> bool:
    """Whether the ranks' numbers add up to that of the whole tensors: the shards tile them."""
    return (sum(parts) - whole) % _PRIME == 0


def _weight(shard: Shard) -> int:
    return _number(f"{shard.name}\0{shard.key}\0{shard.dtype}\0{shard.shape}")


def _value(box: Box) -> int:
    product = 1
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        product = product * _series(dim, offset, size) % _PRIME
    return product


@lru_cache(maxsize=1 << 14)
def _series(dim: int, start: int, size: int) -> int:
    """x ** start + ... + x ** (start + size - 1) at the dimension's point."""
    x = _point(dim)
    return pow(x, start, _PRIME) * (pow(x, size, _PRIME) - 1) * pow(x - 1, -1, _PRIME) % _PRIME


@cache
def _point(dim: int) -> int:
    return 2 + _number(f"dimension {dim}") % (_PRIME - 2)


def _number(text: str) -> int:
    return xxh3_128_intdigest(text.encode(errors="surrogatepass")) % _PRIME
