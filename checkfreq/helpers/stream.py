"""A file that is written from beginning to end, in whole pages, past the page cache."""

from __future__ import annotations

import io
import mmap

from checkfreq.store.fileops import PayloadFile
from checkfreq.types import round_up_to_page

#: Written at once; direct I/O needs whole pages at an address of whole pages.
_PIECE_BYTES = 4 << 20


class PayloadStream(io.RawIOBase):
    """What ``torch.save`` writes to. Call `finish` after the last write.

    ``failure`` is the first error of a write. After it, writes are accepted and dropped: torch
    ends a file in a C++ destructor, where a second exception would end the process.
    """

    def __init__(self, payload: PayloadFile, *, piece_bytes: int = _PIECE_BYTES) -> None:
        self._payload = payload
        self._piece = memoryview(mmap.mmap(-1, piece_bytes))
        self._filled = 0
        self._written_bytes = 0
        self.failure: BaseException | None = None

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Take all of ``data``."""
        with memoryview(data) as whole, whole.cast("B") as view:
            num_bytes = len(view)
            if self.failure is None:
                try:
                    self._take(view)
                except BaseException as error:
                    self.failure = error
                    raise
        return num_bytes

    def finish(self) -> None:
        """Write what is left, cut the file to its length and make it durable."""
        total_bytes = self._written_bytes + self._filled
        if self._filled:
            end = round_up_to_page(self._filled)
            self._piece[self._filled : end] = bytes(end - self._filled)
            self._payload.pwrite(self._piece[:end], self._written_bytes)
        self._payload.truncate(total_bytes)
        self._payload.datasync()

    def _take(self, view: memoryview) -> None:
        while len(view):
            count = min(len(view), len(self._piece) - self._filled)
            self._piece[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == len(self._piece):
                self._payload.pwrite(self._piece, self._written_bytes)
                self._written_bytes += self._filled
                self._filled = 0
