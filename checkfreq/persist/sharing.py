"""Files of a checkpoint that the one before has as well: linked instead of written.

The trainer says which files hold state that is not expected to change, and gives their contents an
id. The worker knows, of its own latest commit, what it digested under that id. The same id stands
for the same digests; under another id the snapshot is digested, and compared. Every so many
checkpoints a file is written again, so that one bad block cannot damage all of them. Nothing is
known after a start, or once a step was set aside: then everything is written. Belongs to the
request thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from checkfreq.persist.writer import digest
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.store import CheckpointStore, Pending
from checkfreq.types import ContentId, FileSpec

_DIGEST_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Known:
    """A file of the latest commit: ``num_steps`` checkpoints from ``first_step`` on share it."""

    entry: FileEntry
    content: ContentId
    step: int
    first_step: int
    num_steps: int = 1

    def has_form_of(self, file: FileSpec) -> bool:
        entry = self.entry
        return (
            (entry.num_bytes, entry.header_bytes) == (file.num_bytes, file.header_bytes)
            and len(entry.tensors) == len(file.tensors)
            and all(
                (a.name, a.dtype, a.shape, a.offset, a.piece_bytes)
                == (b.name, b.dtype, b.shape, b.offset, b.piece_bytes)
                for a, b in zip(entry.tensors, file.tensors, strict=True)
            )
        )


class Sharing:
    """What one worker knows of files that the next checkpoint may share.

    ``full_copy_every``: so many checkpoints share one at most; 1: none does.
    """

    def __init__(self, store: CheckpointStore, *, full_copy_every: int) -> None:
        self._store = store
        self._full_copy_every = full_copy_every
        self._known: dict[str, _Known] = {}
        self._surprises: list[str] = []
        self._is_refused = False  # the latest link that was asked for

    def unchanged(
        self, contents: Mapping[str, ContentId], files: Sequence[FileSpec], slot: memoryview
    ) -> dict[str, FileEntry]:
        """By name, the entries of the files in ``slot`` that the next checkpoint may share."""
        found = {}
        for file in files:
            known, content = self._known.get(file.name), contents.get(file.name)
            if known is None or content is None or not known.has_form_of(file):
                continue
            if known.num_steps >= self._full_copy_every:
                continue
            if content == known.content or _entry_of(file, slot) == known.entry:
                found[file.name] = known.entry
        return found

    def link(self, pending: Pending, entries: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
        """Link these files into a pending checkpoint; returns those that could be."""
        linked = {
            name: entry
            for name, entry in entries.items()
            if pending.link_payload(self._store.locate(self._known[name].step, name), entry)
        }
        if entries:
            self._is_refused = not linked
        return linked

    def committed(
        self, record: Manifest, contents: Mapping[str, ContentId], linked: Collection[str]
    ) -> None:
        """A checkpoint was committed; its files in ``linked`` were not written for it."""
        step, before = record.step, self._known
        self._known, self._surprises = {}, []
        for entry in record.files:
            content = contents.get(entry.name)
            if content is not None and entry.name in linked:
                old = before[entry.name]
                self._known[entry.name] = replace(
                    old, content=content, step=step, num_steps=old.num_steps + 1
                )
            elif content is not None:
                self._known[entry.name] = _Known(entry, content, step, first_step=step)
                self._compare(entry, content, before.get(entry.name))

    def forget(self) -> None:
        """Write everything next: what is in the directory is not what this worker knew."""
        self._known, self._surprises = {}, []

    def reserve(self) -> frozenset[int]:
        """Steps that are not to be removed: the newest with another copy of what is shared.

        Also of what the next checkpoint may share: once it does it is too late.
        """
        if self._full_copy_every == 1 or self._is_refused:
            return frozenset()
        firsts = {one.first_step for one in self._known.values()}
        there = self._store.steps() if firsts else []
        older = (max((step for step in there if step < first), default=None) for first in firsts)
        return frozenset(step for step in older if step is not None)

    def warning(self) -> str:
        """What the latest commit brought to light that should not be; "" if nothing."""
        return "; ".join(self._surprises)

    def _compare(self, entry: FileEntry, content: ContentId, before: _Known | None) -> None:
        """A file was written, and digested, again."""
        if before is None or content[0] != before.content[0] or entry == before.entry:
            return
        self._surprises.append(
            f"frozen state in {entry.name} has changed although no write to it was seen: the "
            f"checkpoints from step {before.first_step} on may hold an older value of it. "
            "Declare what is written that way in CFCheckpoint(volatile=(...)), or set "
            "CFConfig(full_copy_every=1)"
        )


def _entry_of(file: FileSpec, slot: memoryview) -> FileEntry:
    (entry,) = digest([file], slot, num_threads=_DIGEST_THREADS)
    return entry
