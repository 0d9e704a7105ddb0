"""Sees writes to settled tensors that came while these were copied, without asking the fence.

A few elements of a few tensors are read at the boundary and again once the tensors have been
copied, before an update may go on, and compared with one another and with the slot. An update
changes nearly every element of nearly every tensor, so few are enough; their number is bounded, so
that the cost is. A write that is undone before the second reading shows in the slot. In host memory
the versions of all tensors are compared as well, which cost a tenth of a microsecond each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.snapshot.arena import Slot

if TYPE_CHECKING:
    from checkfreq.snapshot.engine import Copy

#: Tensors read per snapshot, runs of neighbouring elements in each, and the size of a run.
MAX_TENSORS = 16
_MAX_RUNS = 2
_RUN_BYTES = 64
#: The most that one reading of all of them can have.
SAMPLE_BYTES = MAX_TENSORS * _MAX_RUNS * _RUN_BYTES


class UnannouncedWrite(StateError):
    """Settled tensors changed although no update asked the fence."""


def require_unchanged(names: Sequence[str]) -> None:
    """Raise UnannouncedWrite if any tensor is named."""
    if names:
        raise UnannouncedWrite(
            f"settled state changed while it was being copied: {', '.join(names)}. Expected only "
            "updates that wait for the copy: step() of a tracked optimizer, and writes inside "
            "`with cf_manager.updating():`. From now on snapshots are complete before the "
            "manager's step() returns, which holds training for longer"
        )


def chosen(sizes: Sequence[int], *, most: int = MAX_TENSORS) -> frozenset[int]:
    """Indices of the tensors to watch: half of them the largest, the others evenly spread."""
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    largest = by_size[: most // 2]
    others = sorted(by_size[most // 2 :])
    return frozenset((*largest, *_spread(others, most - len(largest))))


def sampled(num_bytes: int) -> list[tuple[int, int]]:
    """(begin, end) of the bytes that stand for a tensor of so many."""
    length = min(num_bytes, _RUN_BYTES)
    runs, step = _runs_over(num_bytes, length)
    return [(at * step, at * step + length) for at in range(runs)]


def _runs_over(count: int, length: int) -> tuple[int, int]:
    """(runs, step): so many runs of ``length`` fit, the last at the end, and begin so far apart."""
    runs = min(_MAX_RUNS, count // length) if length else 0
    return runs, (count - length) // max(1, runs - 1)


def _spread(found: Sequence[int], count: int) -> list[int]:
    if len(found) <= count:
        return list(found)
    return [found[index * len(found) // count] for index in range(count)]


class Watch(NamedTuple):
    """Where one tensor is read: ``runs`` runs of ``length`` elements.

    They begin ``step`` elements apart in the storage, from the first element on, and ``slot_step``
    elements apart in the slot, from the byte ``slot_offset`` on.
    """

    name: str
    source: Tensor
    runs: int
    length: int
    step: int
    slot_offset: int
    slot_step: int

    @classmethod
    def of(cls, copy: Copy) -> Watch:
        """Places all over a contiguous tensor, or on the diagonal of any other."""
        source = copy.source
        if source.is_conj() or source.is_neg() or not copy.num_bytes:
            return cls(copy.name, source, 0, 0, 0, 0, 0)  # its storage has other bits than the slot
        if source.is_contiguous():
            count = source.numel()
            length = min(count, max(1, _RUN_BYTES // source.element_size()))
            runs, step = _runs_over(count, length)
            return cls(copy.name, source, runs, length, step, copy.offset, step)
        runs, step = _runs_over(min(source.shape), 1)
        row_major = sum(_row_major_strides(source))
        return cls(
            copy.name, source, runs, 1, step * sum(source.stride()), copy.offset, step * row_major
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of one reading."""
        return self.runs * self.length * self.source.element_size()

    def view(self) -> Tensor:
        """The elements in the tensor's own storage, `[runs, length]`."""
        shape, strides = (self.runs, self.length), (self.step, 1)
        return self.source.as_strided(shape, strides, self.source.storage_offset())

    def read_host(self) -> bytes:
        """The elements now, of a tensor in host memory."""
        address, size = self.source.data_ptr(), self.source.element_size()
        begins = (address + i * self.step * size for i in range(self.runs))
        return b"".join([ctypes.string_at(begin, self.length * size) for begin in begins])

    def read_slot(self, slot: Slot) -> bytes:
        """The same elements as they lie in the slot."""
        size = self.source.element_size()
        begins = (self.slot_offset + i * self.slot_step * size for i in range(self.runs))
        return b"".join([slot.memory[begin : begin + self.length * size] for begin in begins])


def watches_over(copies: Iterable[Copy]) -> list[Watch]:
    """A watch for each copy that was chosen and that can be read."""
    found = [Watch.of(copy) for copy in copies if copy.watched]
    return [watch for watch in found if watch.runs]


class HostWatch:
    """Reads tensors in host memory: once when it is made, and again when it is asked.

    In-place operations of torch also count a tensor's version up, whichever elements they change.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._versions = _versions(copies)
        self._watched = watches_over(copies)
        self._before = [watch.read_host() for watch in self._watched]

    def changed(self, slot: Slot) -> list[str]:
        """Tensors that are not as they were, or that lie otherwise in the slot. Any thread."""
        versions = zip(self._copies, self._versions, _versions(self._copies), strict=True)
        readings = zip(self._watched, self._before, strict=True)
        written = [copy.name for copy, before, now in versions if before != now]
        differing = [
            watch.name
            for watch, before in readings
            if watch.read_host() != before or watch.read_slot(slot) != before
        ]
        return list(dict.fromkeys((*written, *differing)))


def _versions(copies: Sequence[Copy]) -> list[int]:
    try:
        return [copy.source._version for copy in copies]
    except RuntimeError:  # a tensor made in inference mode has none
        return [0 if copy.source.is_inference() else copy.source._version for copy in copies]


def _row_major_strides(tensor: Tensor) -> list[int]:
    strides = [1]
    for size in reversed(tensor.shape[1:]):
        strides.append(strides[-1] * size)
    return strides
