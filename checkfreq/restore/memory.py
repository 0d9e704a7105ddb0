"""Reads checkpoints from the memory that a killed run left, in front of its directory.

Memory is never trusted more than the disk. A step that is on disk is read by the record on disk,
and only if the same attempt wrote it; one that is not counts only if it has yet to be written, and
is newer than all that are. Sizes are checked against the slot, and every digest by whoever reads. A
file that no worker on this machine holds, such as another rank's, is read from the directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from checkfreq.errors import CorruptCheckpointError, NoCheckpointError
from checkfreq.store.fileops import ReadFile
from checkfreq.store.manifest import FileEntry
from checkfreq.store.marks import StepMark
from checkfreq.store.records import Records
from checkfreq.store.source import CheckpointSource
from checkfreq.store.verify import SizedFile
from checkfreq.types import PAGE_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class HeldSnapshot:
    """A complete snapshot, of one rank, in the ``memory`` of a slot.

    ``record``: the manifest of the checkpoint, or what this rank's part of one says. ``offsets``:
    where in ``memory`` each file begins. ``is_whole``: there is no other rank. ``is_durable``: the
    checkpoint, or this part, was on disk.
    """

    step: int
    attempt: str
    record: bytes
    offsets: Mapping[str, int]
    memory: memoryview
    is_whole: bool
    is_durable: bool


class MemorySource(CheckpointSource):
    """The snapshots that workers on this machine hold of the checkpoints of ``directory``."""

    is_memory = True

    def __init__(self, directory: CheckpointSource, held: Sequence[HeldSnapshot]) -> None:
        self._directory = directory
        self._records = Records(directory)
        self._held = tuple(held)
        self._usable: dict[int, list[HeldSnapshot]] = {}  # as of the latest ``steps``

    @property
    def name(self) -> str:
        """See CheckpointSource."""
        return f"the memory of {self._directory.name}"

    def where(self, step: int, file: str = "") -> str:
        """See CheckpointSource."""
        return f"{self.name}, step {step}{' ' * bool(file)}{file}"

    def steps(self) -> list[int]:
        """See CheckpointSource."""
        on_disk = self._directory.steps()
        self._usable = {}
        for one in self._held:
            if self._counts(one, on_disk):
                self._usable.setdefault(one.step, []).append(one)
        return sorted(self._usable)

    def holds(self, step: int) -> bool:
        """See CheckpointSource."""
        return step in self.steps()

    def ever_held(self) -> bool:
        """See CheckpointSource: the directory says it, or there is no checkpoint yet."""
        return False

    def holds_superseded(self) -> bool:
        """See CheckpointSource."""
        return False

    def links(self) -> list[int]:
        """See CheckpointSource: there are none."""
        return []

    def log_links(self) -> None:
        """See CheckpointSource."""

    def marks(self) -> Mapping[int, StepMark]:
        """See CheckpointSource."""
        return self._directory.marks()

    def record(self, step: int) -> bytes:
        """See CheckpointSource: the directory's, if it has the step."""
        if step not in self._directory.steps():
            for one in self._usable.get(step, ()):
                if one.is_whole:
                    return one.record
        return self._directory.record(step)

    def rank_record(self, step: int, rank: int) -> bytes:
        """See CheckpointSource."""
        return self._directory.rank_record(step, rank)

    def check_sizes(self, step: int, files: Iterable[SizedFile]) -> None:
        """See CheckpointSource."""
        elsewhere = [entry for entry in files if self._view(step, entry) is None]
        if elsewhere:
            self._directory.check_sizes(step, elsewhere)

    def open_payload(self, step: int, entry: FileEntry) -> ReadFile:
        """See CheckpointSource."""
        view = self._view(step, entry)
        return self._directory.open_payload(step, entry) if view is None else HeldFile(view)

    def _counts(self, one: HeldSnapshot, on_disk: Sequence[int]) -> bool:
        if one.step in on_disk:
            return self._is_on_disk(one)
        # A durable step that is gone was removed, and one older than the newest has lost its place.
        return one.is_whole and not one.is_durable and one.step > max(on_disk, default=-1)

    def _is_on_disk(self, one: HeldSnapshot) -> bool:
        """Whether the step on disk was written by the same attempt."""
        try:
            if self._directory.record(one.step) == one.record:
                return True
            return self._records.summary(one.step).attempt == one.attempt
        except (NoCheckpointError, CorruptCheckpointError):
            return False  # pruned meanwhile; or damaged, which the directory reports

    def _view(self, step: int, entry: SizedFile) -> memoryview | None:
        """The bytes of a file, if a worker holds it; CorruptCheckpointError if it has no room."""
        for one in self._usable.get(step, ()):
            if entry.name in one.offsets:
                return self._within(one, entry)
        return None

    def _within(self, one: HeldSnapshot, entry: SizedFile) -> memoryview:
        start = one.offsets[entry.name]
        room = len(one.memory) - start
        if start % PAGE_BYTES or not 0 <= entry.num_bytes <= room:
            raise CorruptCheckpointError(
                self.where(one.step, entry.name),
                check="place in the slot",
                expected=f"{entry.num_bytes} bytes from a page on, of {len(one.memory)}",
                got=f"byte {start}",
            )
        return one.memory[start : start + entry.num_bytes]


class HeldFile:
    """A file that lies in memory."""

    direct = False

    def __init__(self, data: memoryview) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """See ReadFile."""
        return len(self._data)

    def view(self, start: int, num_bytes: int) -> memoryview:
        """See FileInMemory."""
        return self._data[start : start + num_bytes]

    def preadinto(self, view: memoryview, offset: int) -> int:
        """See ReadFile."""
        found = self._data[offset : offset + len(view)]
        view[: len(found)] = found
        return len(found)

    def close(self) -> None:
        """See ReadFile."""
