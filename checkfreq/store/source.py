"""Where checkpoints are read from: a directory, or the copies of one in an object store.

A restore reads through this interface alone, and takes the newest step that validates in any of
its sources. Whatever a source delivers is untrusted: `parse` validates the record, sizes are
checked before memory is allocated, and whoever reads a payload compares every digest. No torch.

`StorageError` means that a source cannot be read now, which is never taken for corruption.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from checkfreq.errors import CorruptCheckpointError, NoCheckpointError, is_outage
from checkfreq.store.fileops import ReadFile
from checkfreq.store.manifest import MANIFEST_NAME, FileEntry, Manifest, seal_of
from checkfreq.store.marks import StepMark
from checkfreq.store.outline import decode_part
from checkfreq.store.parts import part_name
from checkfreq.store.tree import Leaf, Tree, decode_record
from checkfreq.store.verify import SizedFile, verify_digests

#: ``check`` of the error that is raised where there are checkpoints and none validates.
NONE_VALID = "checkpoints"

#: A step of a directory that cannot be read is tried again after these, in seconds; requests to a
#: mirror have their own.
_PAUSES_S = (0.1, 0.4)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rejected:
    """A step that was walked past, and why.

    ``is_here``: in this rank's own directory. ``in_mirror``: not in a directory at all.
    ``in_memory``: in the memory that a killed run left; what is on disk is not known to be damaged.
    An OSError: a disk or a server did not answer, and nothing is known to be damaged.
    """

    step: int
    error: CorruptCheckpointError | OSError
    is_here: bool = True
    in_mirror: bool = False
    in_memory: bool = False

    @property
    def is_unreadable(self) -> bool:
        """Whether it could not be read, rather than is damaged."""
        return isinstance(self.error, OSError)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a payload file's bytes with a digest of its own (xxh3_128, 32 digits).

    A read across the border of two takes more than one request. The digest tells what the bytes
    were when they were stored; readers check those of the manifest, which cover the same bytes.
    """

    start: int
    num_bytes: int
    digest: str


class CheckpointSource(ABC):
    """Committed checkpoints, for readers. No method takes a lock or changes anything."""

    #: Whether the source is a directory of this machine, where a damaged step can be set aside.
    is_local: bool = True
    #: Whether the source is memory that a killed run left, in front of a directory.
    is_memory: bool = False
    #: How many reads at a time it takes to use the source's bandwidth, at least.
    num_requests: int = 1
    #: Most bytes of one read. A buffer of so many stays in the processor's cache, where the bytes
    #: are digested and copied: 8 MiB took up to twice as long (measured 2026-11).
    read_bytes: int = 1 << 20

    @property
    @abstractmethod
    def name(self) -> str:
        """The directory or the URL, for messages."""

    @abstractmethod
    def steps(self) -> list[int]:
        """Committed steps, ascending; empty if there is nothing at all."""

    @abstractmethod
    def where(self, step: int, file: str = "") -> str:
        """Where a step, or a file of it, is or would be; for messages."""

    @abstractmethod
    def holds(self, step: int) -> bool:
        """Whether there is anything with the step's name."""

    @abstractmethod
    def ever_held(self) -> bool:
        """Whether there is a checkpoint, or was one that had to be set aside as damaged."""

    @abstractmethod
    def holds_superseded(self) -> bool:
        """Whether any step was set aside in favour of a later commit, after a run went back."""

    @abstractmethod
    def record(self, step: int) -> bytes:
        """The bytes of the step's commit record, not validated: see `parse`.

        Raises NoCheckpointError, CorruptCheckpointError (the record is missing), OSError.
        """

    @abstractmethod
    def rank_record(self, step: int, rank: int) -> bytes:
        """The bytes of a rank's record that the step's `Tree` names; raises like ``record``."""

    @abstractmethod
    def check_sizes(self, step: int, files: Iterable[SizedFile]) -> None:
        """CorruptCheckpointError for a file that is missing or differs in size from its entry."""

    @abstractmethod
    def open_payload(self, step: int, entry: FileEntry) -> ReadFile:
        """Open a payload file of a step; CorruptCheckpointError if missing or of the wrong size."""

    @abstractmethod
    def marks(self) -> Mapping[int, StepMark]:
        """Pins, metrics and the end of the run, by step."""

    @abstractmethod
    def log_links(self) -> None:
        """Warn once of each of `links`."""

    def attempt(self, step: int) -> str:
        """The attempt that wrote the step; raises what `manifest` raises."""
        return self.head(step).attempt

    def pieces(self, step: int, entry: FileEntry) -> Sequence[Piece]:
        """The pieces of a payload file, in file order; none where it is one file."""
        return ()

    @abstractmethod
    def links(self) -> list[int]:
        """Steps whose name is a symbolic link, ascending; they are not checkpoints."""

    def manifest(self, step: int) -> Manifest:
        """The step's commit record, with those of all ranks.

        Raises NoCheckpointError, CorruptCheckpointError, ConfigError (newer format), OSError.
        """
        return self.whole(self.head(step))

    def head(self, step: int) -> Manifest | Tree:
        """The step's commit record as it is stored; raises like `manifest`."""
        return self.parse(step, self.record(step))

    def parse(self, step: int, record: bytes) -> Manifest | Tree:
        """Validate and decode a step's commit record; raises like `manifest`."""
        path = self.where(step, MANIFEST_NAME)
        found = decode_record(record, path=path)
        if found.step != step:
            raise CorruptCheckpointError(path, check="step", expected=step, got=found.step)
        return found

    def whole(self, root: Manifest | Tree) -> Manifest:
        """The record with those of all ranks; raises like `manifest`."""
        return root.joined(list(self.parts(root))) if isinstance(root, Tree) else root

    def parts(
        self, root: Manifest | Tree, ranks: Collection[int] | None = None
    ) -> Iterator[Manifest]:
        """The records of all ranks, or of ``ranks``, each when it is asked for.

        Where the ranks have no records of their own: the one record there is. Raises like
        `manifest`.
        """
        if not isinstance(root, Tree):
            yield root
            return
        for rank, leaf in root.leaves.items():
            if ranks is None or rank in ranks:
                yield self._rank_part(root, leaf)

    def _rank_part(self, tree: Tree, leaf: Leaf) -> Manifest:
        data = self.rank_record(tree.step, leaf.rank)
        part = decode_part(data, path=(path := self.where(tree.step, part_name(leaf.rank))))
        expected = tree.identity_of(leaf)
        got = (len(data), seal_of(data), part.step, part.attempt, part.world, *part.ranks)
        if got != expected:
            raise CorruptCheckpointError(path, check="record", expected=expected, got=got)
        return part

    def require(self, step: int) -> None:
        """Raise NoCheckpointError, listing the steps there are, unless ``step`` is one of them."""
        steps = self.steps()
        if step in steps:
            return
        there = ", ".join(map(str, steps)) or "none"
        linked = step in self.links()
        name = self.where(step).rpartition("/")[2]
        but = f" ({name} is a symbolic link, not followed)" if linked else ""
        raise NoCheckpointError(f"{self.name} has no step {step}{but}; it has: {there}")

    def glance(self, step: int) -> Manifest | Tree:
        """`head`, after checking that every file it names is there with its size.

        Of a `Tree` these are the ranks' records, whose own files are not looked at.
        """
        root = self.head(step)
        self.check_sizes(step, root.files)
        return root

    def inspect(self, step: int) -> Manifest:
        """`manifest`, after checking that every file is there with its size; reads no payload."""
        manifest = self.manifest(step)
        self.check_sizes(step, manifest.files)
        return manifest

    def verify(self, step: int) -> Manifest | Tree:
        """`head`, after checking every digest of every file."""
        root = self.head(step)
        for part in self.parts(root):
            for entry in part.files:
                file = self.open_payload(step, entry)
                try:
                    verify_digests(self.where(step, entry.name), entry, file)
                finally:
                    file.close()
        return root


def newest_valid(
    sources: Sequence[CheckpointSource],
    *,
    check: Callable[[CheckpointSource, int], T],
    sleep: Callable[[float], object] = time.sleep,
) -> tuple[T, tuple[Rejected, ...]]:
    """Walk back from the newest step of any source to the first for which ``check`` returns.

    Where several sources hold a step, the first of them comes first. Returns what ``check``
    returned, and what it rejected on the way, newest first. ``check`` raises
    CorruptCheckpointError for a step to be walked past. So is, after retries, one that cannot be
    read (`is_outage`), unless no older one can be: then that error is raised, as any other is.
    Steps that another process prunes meanwhile are ignored. Raises NoCheckpointError if no source
    ever held a checkpoint, CorruptCheckpointError if one did and none validates.
    """
    for source in sources:
        source.log_links()
    before: list[tuple[int, int]] | None = None
    while True:
        rejected: list[Rejected] = []
        listed = newest_first(sources)
        for step, number in listed:
            source = sources[number]
            try:
                patient = source.is_local and not any(one.is_unreadable for one in rejected)
                pauses_s = _PAUSES_S if patient else ()
                return _tried(partial(check, source, step), pauses_s, sleep), tuple(rejected)
            except CorruptCheckpointError as error:
                rejected.append(rejection(source, step, error))
            except NoCheckpointError:
                if source.holds(step):
                    raise
                if listed == before:  # nothing was pruned: listing again would never end
                    raise _cannot_be_opened(source, step) from None
                before = listed
                break  # pruned since it was listed, so a newer one was committed: list again
            except OSError as error:
                if not is_outage(error):
                    raise
                source.steps()  # raises where nothing can be read there, as in an outage
                error = error.with_traceback(None)
                rejected.append(Rejected(step, error, is_here=False))
        else:
            raise _none_valid(sources, rejected)


def _tried(read: Callable[[], T], pauses_s: Sequence[float], sleep: Callable[[float], object]) -> T:
    """``read()``, again after each pause for as long as a disk or a server does not answer."""
    for pause_s in pauses_s:
        try:
            return read()
        except OSError as error:
            if not is_outage(error):
                raise
        sleep(pause_s)
    return read()


def rejection(source: CheckpointSource, step: int, error: CorruptCheckpointError) -> Rejected:
    """``error`` was found in a step of ``source``."""
    # The traceback's frames would keep the failed read's buffers alive.
    error = error.with_traceback(None)
    return Rejected(
        step,
        error,
        is_here=source.is_local and not source.is_memory,
        in_mirror=not source.is_local,
        in_memory=source.is_memory,
    )


def newest_first(sources: Sequence[CheckpointSource]) -> list[tuple[int, int]]:
    """Every step with the number of a source that holds it, newest first, then by source."""
    found = [(step, number) for number, source in enumerate(sources) for step in source.steps()]
    return sorted(found, key=lambda item: (-item[0], item[1]))


def _cannot_be_opened(source: CheckpointSource, step: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        source.where(step), check="directory", expected="a checkpoint", got="nothing"
    )


def _none_valid(sources: Sequence[CheckpointSource], rejected: Sequence[Rejected]) -> Exception:
    for item in rejected:
        if item.is_unreadable:
            return item.error
    links = [f"{s.where(step)} is a symbolic link" for s in sources for step in s.links()]
    names = " and ".join(source.name for source in sources if not source.is_memory)
    if not rejected and not links and not any(source.ever_held() for source in sources):
        return NoCheckpointError(f"{names} holds no checkpoint")
    found = "; ".join([*(f"step {item.step}: {item.error}" for item in rejected), *links])
    return CorruptCheckpointError(
        names,
        check=NONE_VALID,
        expected="at least one that validates",
        got=found or "only quarantined ones",
    )
