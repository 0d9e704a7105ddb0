"""The slots of the trainer's arena as its worker knows them, and the complete snapshots in them.

A snapshot is complete once the trainer has handed it over. Whether its slot still holds it is known
as long as the trainer was not told that it may be filled again; after that, only the digests of its
record tell. The main thread notes messages as they arrive, the request thread what became of them,
and a third one computes digests: one lock, held for lines.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import traceback
from dataclasses import dataclass

from checkfreq.persist import protocol as p
from checkfreq.persist.commit import own_record
from checkfreq.persist.frames import Stage
from checkfreq.persist.offer import Body, Snapshot, extras_of
from checkfreq.persist.writer import digest
from checkfreq.store.fileops import read_only
from checkfreq.store.manifest import Manifest
from checkfreq.types import FileSpec, Role

_DIGEST_THREADS = 4


@dataclass(slots=True)
class _Held:
    """``is_given_back``: the trainer may have filled the slot again."""

    request: p.Persist
    files: tuple[FileSpec, ...]
    stage: Stage = Stage.IN_FLIGHT
    record: Manifest | None = None
    is_given_back: bool = False

    @property
    def is_undescribed(self) -> bool:
        return self.record is None and not self.is_given_back

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class Slots:
    """All slots that a trainer shared. ``memory`` and ``layouts`` are the request thread's."""

    def __init__(self) -> None:
        self.memory: dict[int, mmap.mmap] = {}
        self.layouts: dict[int, tuple[FileSpec, ...]] = {}
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._announced: dict[int, tuple[FileSpec, ...]] = {}
        self._held: dict[int, _Held] = {}

    # ---- the main thread, as messages arrive

    def note(self, message: p.Message) -> None:
        """Note what a message of the trainer says of a slot."""
        with self._lock:
            match message:
                case p.SlotMemory():
                    self._held.pop(message.slot, None)
                    self._announced.pop(message.slot, None)
                case p.SlotLayout():
                    self._announced[message.slot] = message.files
                case p.Persist() if message.slot in self._announced:
                    self._held[message.slot] = _Held(message, self._announced[message.slot])

    # ---- the request thread

    def map(self, message: p.SlotMemory, fd: int) -> None:
        """Map a slot; ``fd`` is closed with the next one of its number."""
        with self._lock:
            old = self._fds.pop(message.slot, None)
            self._fds[message.slot] = fd
        if old is not None:
            os.close(old)
        self.memory[message.slot] = mmap.mmap(fd, message.num_bytes, prot=mmap.PROT_READ)

    def ended(
        self, request: p.Persist, record: Manifest | None, *, durable: bool, given_back: bool
    ) -> None:
        """A persist ended; ``given_back``: the trainer is alive to be told so."""
        with self._lock:
            held = self._held.get(request.slot)
            if held is None or held.request.attempt != request.attempt:
                return
            held.stage = Stage.DURABLE if durable else Stage.LOST
            held.record = record or held.record
            held.is_given_back = given_back

    # ---- while there is no trainer

    def newest(self) -> tuple[int, Stage] | None:
        """The newest complete snapshot: its step and stage; None if there is none."""
        with self._lock:
            found = [(held.request.step, held.stage) for held in self._there().values()]
        return max(found, key=lambda one: one[0], default=None)

    @property
    def num_bytes(self) -> int:
        """Memory in all slots."""
        with self._lock:
            return sum(os.fstat(fd).st_size for fd in self._fds.values())

    def adopted(self) -> None:
        """There is a trainer again: every slot that is not being written is its to fill."""
        with self._lock:
            for held in self._held.values():
                held.is_given_back = held.is_given_back or held.stage is not Stage.IN_FLIGHT

    def are_described(self) -> bool:
        """Whether every snapshot that is sure to be whole has its record."""
        with self._lock:
            return not any(held.is_undescribed for held in self._there().values())

    def describe(self, role: Role) -> None:
        """Compute the digests, and make the records, that no persist has made yet."""
        with self._lock:
            found = [(slot, h) for slot, h in self._there().items() if h.is_undescribed]
        for slot, held in found:
            record = None
            try:
                record = self._record_of(slot, held, role)
            except Exception:  # a bug of ours: what cannot be described is not offered
                traceback.print_exc()
            with self._lock:
                if held.is_undescribed:  # else it may have been filled again meanwhile
                    held.record, held.is_given_back = record, record is None

    def offer(self, role: Role) -> tuple[Body, list[int]]:
        """What can be offered, and the slots' own descriptors in its order."""
        with self._lock:
            sizes = {slot: os.fstat(fd).st_size for slot, fd in sorted(self._fds.items())}
            whole = {slot: size for slot, size in sizes.items() if size > 0}
            snapshots = tuple(
                _snapshot(slot, whole[slot], held, held.record)
                for slot, held in self._there().items()
                if held.record is not None
            )
            return Body(role, tuple(whole.items()), snapshots), [self._fds[slot] for slot in whole]

    def _record_of(self, slot: int, held: _Held, role: Role) -> Manifest:
        with self._lock:
            fd = read_only(self._fds[slot])  # its own mapping: the other one may be replaced
        try:
            memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with memoryview(memory) as view:
            entries = digest(held.files, view, num_threads=_DIGEST_THREADS)
        return own_record(held.request, role, entries)

    def _there(self) -> dict[int, _Held]:
        """What is held in slots that are whole: a trainer may have died while it freed them."""
        found = {}
        for slot, held in self._held.items():
            end = max((f.slot_offset + f.num_bytes for f in held.files), default=0)
            with contextlib.suppress(KeyError, OSError):
                if os.fstat(self._fds[slot]).st_size >= end:
                    found[slot] = held
        return found


def _snapshot(slot: int, slot_bytes: int, held: _Held, record: Manifest) -> Snapshot:
    return Snapshot(
        held.request.step,
        held.request.attempt,
        slot,
        slot_bytes,
        held.stage,
        {file.name: file.slot_offset for file in held.files},
        extras_of(held.request),
        record.encode(),
    )
