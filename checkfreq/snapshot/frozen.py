"""Frozen tensors are not copied into a slot that holds them already, and are known not to change.

Before each snapshot the memory and the version of each frozen tensor, and a few elements of many,
are compared with those of the snapshot before. Within a series nothing was seen to change. After so
many snapshots all are copied, and so digested, once more: whatever was missed is found then. Where
nothing can be told (on a device, in a run whose updates are not seen, after a restore) each
snapshot begins a series, copies all, and leaves the comparison to the worker's digests. `begin`
and `forget` belong to the training thread, `ended` to any.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from checkfreq.snapshot.arena import Slot
from checkfreq.snapshot.engine import Copy
from checkfreq.snapshot.layout import StateLayout
from checkfreq.snapshot.watch import Watch, chosen
from checkfreq.types import ContentId

NOTHING: frozenset[int] = frozenset()
#: Reading a few elements of one takes some microseconds of the training thread.
_MAX_SAMPLED = 64


@dataclass(frozen=True, slots=True)
class _Seen:
    """Frozen tensors as they were: where, which version, and the bytes of a few elements.

    A storage is referred to weakly: another one cannot have its address while it is known here.
    """

    storages: tuple[StorageWeakRef, ...]
    places: tuple[tuple[int, int], ...]
    sample: tuple[bytes, ...]

    def is_still(self, tensors: Sequence[Tensor], watches: Sequence[Watch]) -> bool:
        return (
            len(tensors) == len(self.storages)
            and self.places == _places(tensors)
            and all(map(_is_storage_of, self.storages, tensors))
            and self.sample == _sample(watches)
        )


class FrozenState:
    """What one run knows of its frozen tensors.

    ``full_copy_every``: so many snapshots are taken for one copy of them at most.
    """

    def __init__(self, *, full_copy_every: int) -> None:
        self._full_copy_every = full_copy_every
        self._content: ContentId = ("", 0)
        self._num_snapshots = 0
        self._seen: _Seen | None = None

    def begin(
        self, copies: Sequence[Copy], layout: StateLayout, slot: Slot, *, can_tell: bool
    ) -> frozenset[int]:
        """Indices of the ``copies`` that ``slot`` has already; says what its files will hold.

        Without ``can_tell`` a write may have been missed.
        """
        slot.contents = {}
        if not layout.frozen:
            self._seen = None
            return NOTHING
        tensors = [copies[index].source for index in layout.frozen]
        can_tell = can_tell and all(tensor.is_cpu for tensor in tensors)
        watches = _watches(copies, layout) if can_tell else []
        is_same = can_tell and self._seen is not None and self._seen.is_still(tensors, watches)
        if not is_same:
            self._content, self._num_snapshots = (uuid.uuid4().hex, 0), 0
        elif self._num_snapshots >= self._full_copy_every:
            self._content, self._num_snapshots = (self._content[0], self._content[1] + 1), 0
        self._num_snapshots += 1
        if not is_same:
            self._seen = _look(tensors, watches) if can_tell else None
        slot.contents = dict.fromkeys(layout.frozen_files, self._content)
        if slot.frozen == self._content:
            return frozenset(layout.frozen)
        slot.frozen = None
        return NOTHING

    @staticmethod
    def ended(slot: Slot, *, complete: bool) -> None:
        """A snapshot ended; if it is ``complete``, its slot holds what ``begin`` said."""
        slot.frozen = next(iter(slot.contents.values()), None) if complete else None

    def forget(self) -> None:
        """State was restored, or written without notice: all is copied again."""
        self._seen = None


def _look(tensors: Sequence[Tensor], watches: Sequence[Watch]) -> _Seen:
    return _Seen(tuple(map(_weak, tensors)), _places(tensors), _sample(watches))


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _places(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    return tuple((tensor.data_ptr(), _version(tensor)) for tensor in tensors)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_storage_of(known: StorageWeakRef, tensor: Tensor) -> bool:
    return bool(known.cdata == tensor.untyped_storage()._cdata)


def _watches(copies: Sequence[Copy], layout: StateLayout) -> list[Watch]:
    sizes = [copies[index].num_bytes for index in layout.frozen]
    numbers = sorted(chosen(sizes, most=_MAX_SAMPLED))
    found = [Watch.of(copies[layout.frozen[number]]) for number in numbers]
    return [watch for watch in found if watch.runs]


def _sample(watches: Sequence[Watch]) -> tuple[bytes, ...]:
    return tuple(watch.read_host() for watch in watches)
