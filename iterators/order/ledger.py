"""Checks that every sample of an epoch was delivered exactly once, with three numbers.

A ``Ledger`` holds the count, the sum and the xor of ``mix64(id)`` over the samples that were
delivered (without pads). Ledgers can be added over batches, restarts and ranks, in any order. At
the end of an epoch the total is compared with the one that the order implies. ``AuditBitmap``
takes a bit per sample and names the missing and doubled samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from iterators.order.epoch import Int64, Order, UInt64, mix64

_MASK = (1 << 64) - 1
_BLOCK = 1 << 16
_ONE = np.uint8(1)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Count, sum modulo 2**64 and xor of the hashed ids of a multiset of samples."""

    count: int = 0
    sum: int = 0
    xor: int = 0

    @classmethod
    def of(cls, ids: ArrayLike) -> Ledger:
        """The ledger of ``ids``, ``[N]`` integers; about 10 us for a batch of 256."""
        array = np.asarray(ids)
        if not array.size:
            return cls()
        hashes: UInt64 = mix64(array.astype(np.uint64))
        total = int(np.add.reduce(hashes))
        return cls(array.size, total, int(np.bitwise_xor.reduce(hashes)))

    def __add__(self, other: Ledger) -> Ledger:
        total = (self.sum + other.sum) & _MASK
        return Ledger(self.count + other.count, total, self.xor ^ other.xor)

    def __sub__(self, other: Ledger) -> Ledger:
        total = (self.sum - other.sum) & _MASK
        return Ledger(self.count - other.count, total, self.xor ^ other.xor)

    def to_dict(self) -> dict[str, int | str]:
        """A JSON-able form. The hashes are text: many JSON readers round integers above 2**53."""
        return {"count": self.count, "sum": f"{self.sum:016x}", "xor": f"{self.xor:016x}"}

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> Ledger:
        """The inverse of ``to_dict``; ``ValueError`` for anything ``to_dict`` cannot return."""
        count, total, xor = state.get("count"), state.get("sum"), state.get("xor")
        if type(count) is not int or count < 0 or not isinstance(total, str):
            raise ValueError(f"not a ledger: {state!r:.200}")
        if not isinstance(xor, str) or len(total) != 16 or len(xor) != 16:
            raise ValueError(f"not a ledger: {state!r:.200}")
        return cls(count, int(total, 16), int(xor, 16))


def ledger_of_range(n: int) -> Ledger:
    """The ledger of ``range(n)``, in constant memory (17 ms for 1.28 million ids)."""
    total = Ledger()
    for start in range(0, n, _BLOCK):
        total += Ledger.of(np.arange(start, min(start + _BLOCK, n)))
    return total


def ids_of_places(order: Order, start: int, stop: int, step: int = 1) -> Iterator[Int64]:
    """The samples at every ``step``-th place of ``[start, stop)``, in blocks of 64 Ki."""
    stride = _BLOCK * step
    for low in range(start, stop, stride):
        yield order.ids(np.arange(low, min(low + stride, stop), step))


def ledger_of_places(order: Order, start: int, stop: int, step: int = 1) -> Ledger:
    """The ledger of the samples at every ``step``-th place of ``[start, stop)``."""
    return sum((Ledger.of(ids) for ids in ids_of_places(order, start, stop, step)), Ledger())


class AuditBitmap:
    """One bit per sample of an epoch, to name the samples that the ledger can only count.

    Takes ``n / 8`` bytes, and about 10 us per batch of 256. Not thread-safe.
    """

    def __init__(self, n: int) -> None:
        self._bits = np.zeros((n + 7) // 8, dtype=np.uint8)
        self._doubled: list[int] = []

    def mark(self, ids: ArrayLike) -> None:
        """Record that the samples ``ids`` were delivered."""
        array = np.asarray(ids, dtype=np.int64)
        unique, counts = np.unique(array, return_counts=True)
        byte, bit = unique >> 3, _ONE << (unique & 7).astype(np.uint8)
        again = (self._bits[byte] & bit != 0) | (counts > 1)
        self._doubled.extend(unique[again].tolist())
        np.bitwise_or.at(self._bits, byte, bit)

    def doubled(self) -> list[int]:
        """Samples delivered more than once, in the order of their second delivery."""
        return list(self._doubled)

    def missing(self, ids: ArrayLike) -> Int64:
        """The samples among ``ids`` that were not delivered, ``[M] int64``."""
        array = np.asarray(ids, dtype=np.int64)
        seen = self._bits[array >> 3] >> (array & 7).astype(np.uint8) & _ONE
        lacking: Int64 = array[seen == 0]
        return lacking
