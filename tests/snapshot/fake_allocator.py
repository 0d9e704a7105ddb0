"""The memory of a fake device, and a caching allocator in front of it, with PyTorch's rules.

What tensors free stays cached, in pieces of the segment that it was cut from. An allocation takes
the smallest cached piece that is large enough, then asks the driver. If the driver, or the limit of
the process, refuses, the allocator flushes: it gives segments that no tensor uses back, for which
it waits for the device, and asks again. A piece beside memory in use is a fragment: it cannot be
given back, and serves only what fits into it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from checkfreq.snapshot.device import MemoryUse


@dataclass(eq=False)
class Piece:
    num_bytes: int
    in_use: bool = False


@dataclass(eq=False)
class _Segment:
    pieces: list[Piece] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    def cut(self, piece: Piece, num_bytes: int) -> None:
        rest = Piece(piece.num_bytes - num_bytes)
        piece.num_bytes = num_bytes
        if rest.num_bytes:
            self.pieces.insert(self.pieces.index(piece) + 1, rest)

    def join(self) -> None:
        joined: list[Piece] = []
        for piece in self.pieces:
            if joined and not (joined[-1].in_use or piece.in_use):
                joined[-1].num_bytes += piece.num_bytes
            else:
                joined.append(piece)
        self.pieces = joined


class FakeAllocator:
    """One device's memory: ``total`` bytes, of which other processes have ``taken``."""

    def __init__(self, total: int = 1 << 40) -> None:
        self.total = total
        self.taken = 0
        #: The most that this process may reserve, as set_per_process_memory_fraction says it.
        self.limit = total
        #: How often cached memory was given back to the driver, which waits for the device.
        self.flushes = 0
        #: Allocations that failed even after that.
        self.ooms = 0
        self.peak_reserved = 0
        self._segments: list[_Segment] = []

    @property
    def reserved(self) -> int:
        return sum(segment.num_bytes for segment in self._segments)

    @property
    def free(self) -> int:
        """What the driver can still give."""
        return self.total - self.taken - self.reserved

    @free.setter
    def free(self, num_bytes: int) -> None:
        """Other processes take everything else that is free."""
        self.taken = self.total - self.reserved - num_bytes

    def allocate(self, num_bytes: int) -> Piece:
        """Memory for a tensor; raises torch.OutOfMemoryError."""
        piece = self._cached(num_bytes) or self._reserve(num_bytes)
        if piece is None:
            self.flush()
            piece = self._reserve(num_bytes)
        if piece is None:
            self.ooms += 1
            raise torch.OutOfMemoryError(f"fake: {num_bytes} bytes wanted, {self.free} free")
        return piece

    def release(self, piece: Piece) -> None:
        """The tensor is gone; its memory stays cached."""
        piece.in_use = False
        for segment in self._segments:
            segment.join()

    def flush(self) -> None:
        """Give every segment that no tensor uses back to the driver."""
        self.flushes += 1
        self._segments = [s for s in self._segments if any(p.in_use for p in s.pieces)]

    def use(self) -> MemoryUse:
        return MemoryUse(
            reserved_bytes=self.reserved,
            peak_bytes=self.peak_reserved,
            limit_bytes=self.limit,
            num_shortages=self.flushes + self.ooms,
        )

    def _cached(self, num_bytes: int) -> Piece | None:
        found = [
            (piece.num_bytes, segment, piece)
            for segment in self._segments
            for piece in segment.pieces
            if not piece.in_use and piece.num_bytes >= num_bytes
        ]
        if not found:
            return None
        _, segment, piece = min(found, key=lambda one: one[0])
        segment.cut(piece, num_bytes)
        piece.in_use = True
        return piece

    def _reserve(self, num_bytes: int) -> Piece | None:
        if num_bytes > min(self.free, self.limit - self.reserved):
            return None
        piece = Piece(num_bytes, in_use=True)
        self._segments.append(_Segment([piece]))
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return piece
