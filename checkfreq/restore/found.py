"""What each rank finds in a checkpoint: the objects, their tensors, the positions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from checkfreq.state.capture import GRADIENTS, POSITIONS, covers
from checkfreq.state.saved import SavedObject, every_tensor, no_tensor
from checkfreq.state.saved_tensor import Reader
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.parts import file_of, shared_files_of, tied_names
from checkfreq.store.source import CheckpointSource, Rejected
from checkfreq.types import Json, round_up_to_page


class VerifyingReader(Reader, Protocol):
    """A reader that can also read files for their digests alone."""

    def verify(self, files: Iterable[FileEntry]) -> None:
        """Read all of some files and keep nothing; CorruptCheckpointError for damage."""


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint whose record is valid, and what each rank finds in it.

    ``files``: those that this rank may need. Tensors are verified when they are read, by
    ``reader``. ``rejected``: the newer steps that
    do not validate. ``remote``: where it is read from, if not from the directory.
    ``is_from_memory``: a killed run had left it in memory.
    """

    manifest: Manifest
    files: tuple[FileEntry, ...]
    reader: VerifyingReader
    rejected: tuple[Rejected, ...] = ()
    remote: CheckpointSource | None = None
    is_from_memory: bool = False

    @property
    def step(self) -> int:
        """The step it was taken at."""
        return self.manifest.step

    @property
    def source(self) -> str:
        """What it is read from: "memory", "directory" or "mirror"."""
        if self.is_from_memory:
            return "memory"
        return "directory" if self.remote is None else "mirror"

    @property
    def state_bytes(self) -> int:
        """Memory that a snapshot of the same state needs."""
        return sum(round_up_to_page(file.num_bytes) for file in self.manifest.files)

    def saved(
        self, name: str, *, path: str, rank: int = 0, declared: Collection[str] = ()
    ) -> SavedObject:
        """The saved state of one object, as ``rank`` sees it.

        A new rank sees the first rank's buffers, such as statistics of batch norms. It sees
        nothing of what is ``declared`` to be each rank's own, whether one rank wrote it or many.
        """
        own = self.manifest.ranks.get(rank, {}).get(name, {})
        json = own if "kind" in own else self.manifest.objects[name]

        tied = self._tied(name) if declared else {}

        def is_not_declared(key: str) -> bool:
            names = [key, *tied.get(key, ())]
            return not any(covers(prefix, name, one) for prefix in declared for one in names)

        files = {file.name: file for file in self.manifest.files}
        is_new = self.is_new(rank)
        saved = SavedObject(
            name,
            json,
            path=path,
            files=[files[one] for one in shared_files_of(name) if one in files],
            reader=self.reader,
            counts=is_not_declared if is_new else every_tensor,
        )
        first = self._first() if is_new else None
        for other, objects in sorted(self.manifest.ranks.items()):
            file = files.get(file_of(name, other))
            if file is not None:
                # Shards count whoever wrote them; other tensors are those of this rank alone.
                own_counts = every_tensor if other == rank else no_tensor
                saved.add_file(
                    file,
                    shards=objects.get(name, {}).get("shards", {}),
                    counts=is_not_declared if other == first else own_counts,
                )
        return saved

    def saved_gradients(self, *, path: str, rank: int) -> SavedObject | None:
        """The gradients that no update has used on ``rank``; None if no rank had any.

        If only other ranks had some, they come without a parameter for this one.
        """
        ranks = [r for r in (rank, *self.manifest.ranks) if GRADIENTS in self.names(r)]
        if not ranks:
            return None
        found = self.saved(GRADIENTS, path=path, rank=ranks[0])
        if ranks[0] == rank:
            return found
        return SavedObject(GRADIENTS, {**found.json, "parameters": {}}, path=path)

    def _tied(self, name: str) -> dict[str, list[str]]:
        """The names that are tied to each key of an object."""
        return tied_names(self.manifest.objects.get(name, {}), name, self.manifest.ranks.values())

    def names(self, rank: int) -> set[str]:
        """Names of the objects that ``rank`` finds, "rng" and "$positions" among them."""
        own = self.manifest.ranks.get(rank, {})
        return {*self.manifest.objects, *self._whole(rank), *({POSITIONS} & own.keys())}

    def is_new(self, rank: int) -> bool:
        """Whether nothing here is of such a rank: it did not exist, or it wrote elsewhere."""
        ranks = self.manifest.ranks
        if not ranks:
            return rank != 0
        return rank not in ranks or (not self._whole(rank) and any(map(self._whole, ranks)))

    def _whole(self, rank: int) -> list[str]:
        """Objects that a rank wrote by itself, more than shards or single tensors of them."""
        own = self.manifest.ranks.get(rank, {})
        return [name for name, json in own.items() if name != POSITIONS and "kind" in json]

    def _first(self) -> int | None:
        """The first rank of which there is more than positions."""
        ranks = self.manifest.ranks
        return next((rank for rank in sorted(ranks) if ranks[rank].keys() - {POSITIONS}), None)

    def positions(self, rank: int) -> Mapping[str, Json]:
        """JSON of the iterators' positions of one rank, by name."""
        ranks = self.manifest.ranks
        objects = ranks.get(rank, {}) if ranks else self.manifest.objects
        found: Mapping[str, Json] = objects.get(POSITIONS, {})
        return found
