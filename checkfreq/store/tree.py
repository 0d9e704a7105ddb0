"""The commit record of many ranks as a tree: the root names the ranks' records and holds none.

So a commit merges nothing, and a reader parses the root and the records that it needs. Of as many
ranks as `CFConfig.tree_from_ranks` says, or more, a checkpoint is::

    manifest.json      the root, version 4: what the leader tracks, and of each rank the size and
                       digest of its record, and what tells whether a reader needs it
    part-<rank>.json   a rank's record, the leader's too: its files and its own objects

A rank's record begins with its *outline* (`outline`), which is all that the leader parses of it.
Pure: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from checkfreq.errors import CorruptCheckpointError
from checkfreq.store import columns
from checkfreq.store.checks import (
    ManifestError,
    as_object,
    load_json,
    require,
    require_count,
    require_match,
    tuple_of,
)
from checkfreq.store.cuts import CutIndex
from checkfreq.store.gc_pause import gc_paused
from checkfreq.store.manifest import (
    DIGEST,
    POSITIONS,
    Manifest,
    fields_text,
    json_lines,
    json_text,
    manifest_of,
    sealed,
    sealed_version,
)
from checkfreq.store.outline import Outline, RankRecord, names_of
from checkfreq.store.parts import (
    check_names,
    listed_tensors,
    part_name,
    require_same,
    shared_files_of,
)
from checkfreq.store.tiling import Shard, add_up, measure
from checkfreq.types import Json

TREE_VERSION = 4
#: The fields of a root beside those of a manifest.
_FIELDS = ("leader", "is_split", "parts", "own", "cuts")

T = TypeVar("T")


class PartFile(NamedTuple):
    """The file with a rank's record."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """What the root says of a rank's record.

    ``num_bytes`` and ``digest``: of the record, ``payload_bytes``: of the rank's files. The others
    as in `Outline`.
    """

    rank: int
    num_bytes: int
    digest: str
    payload_bytes: int
    names: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    positions: Json = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what in ("rank", "num_bytes", "payload_bytes"):
            require_count(getattr(self, what), f"part: {what}")
        require_match(DIGEST, self.digest, "part: digest", "16 hexadecimal digits")

    @classmethod
    def of(cls, record: RankRecord) -> Leaf:
        """The leaf of a record that was read."""
        outline = record.outline
        return cls(
            outline.rank,
            record.num_bytes,
            record.digest,
            sum(outline.files.values()),
            outline.names,
            outline.whole,
            outline.positions,
        )

    @property
    def stub(self) -> Json:
        """What stands for the rank's own objects where its record is not read."""
        return {name: {"kind": None} if name in self.whole else {} for name in self.names}

    @property
    def with_positions(self) -> Json:
        """The rank's own objects as far as the root has them."""
        return {POSITIONS: self.positions} if self.positions else {}


@dataclass(frozen=True, slots=True)
class Tree:
    """The root of a checkpoint's record.

    ``root``: the leader's record without files or ranks. ``leaves``: by rank, ascending.
    ``is_split``: state that is the same on all ranks is divided among them.
    """

    root: Manifest
    leader: int
    leaves: Mapping[int, Leaf]
    cuts: CutIndex
    is_split: bool = False

    def __post_init__(self) -> None:
        below = all(rank < self.world for rank in self.leaves)
        require(below, "parts", f"ranks below world {self.world}", list(self.leaves))
        require(self.leader in self.leaves, "leader", "one of the ranks", self.leader)
        require(not self.root.files, "files", "none in the root", len(self.root.files))

    @classmethod
    def of(cls, leaders: Manifest, records: Iterable[RankRecord]) -> Tree:
        """The tree of the records of all ranks, the leader's own among them."""
        (leader,) = leaders.ranks
        outlines = sorted(records, key=lambda record: record.outline.rank)
        return cls(
            replace(leaders, files=(), ranks={}),
            leader,
            {record.outline.rank: Leaf.of(record) for record in outlines},
            CutIndex.of({record.outline.rank: record.outline.cuts for record in outlines}),
            any(record.outline.is_split for record in outlines),
        )

    @property
    def files(self) -> tuple[PartFile, ...]:
        """The ranks' records as files. Those name the payloads."""
        leaves = self.leaves.values()
        return tuple(PartFile(part_name(leaf.rank), leaf.num_bytes) for leaf in leaves)

    def identity_of(self, leaf: Leaf) -> tuple[object, ...]:
        """What a rank's record has to be: length, digest, step, attempt, world and rank."""
        root = self.root
        return (leaf.num_bytes, leaf.digest, root.step, root.attempt, root.world, leaf.rank)

    @property
    def step(self) -> int:
        """See Manifest, as of the next ones."""
        return self.root.step

    @property
    def attempt(self) -> str:
        """See Manifest."""
        return self.root.attempt

    @property
    def world(self) -> int:
        """See Manifest."""
        return self.root.world

    @property
    def created_unix_s(self) -> float:
        """See Manifest."""
        return self.root.created_unix_s

    @property
    def versions(self) -> dict[str, str]:
        """See Manifest."""
        return self.root.versions

    @property
    def objects(self) -> Json:
        """See Manifest."""
        return self.root.objects

    @property
    def num_bytes(self) -> int:
        """See Manifest."""
        return sum(leaf.payload_bytes for leaf in self.leaves.values())

    def encode(self) -> bytes:
        """The file's bytes; ValueError if ``objects`` holds what JSON cannot express."""
        leaves = self.leaves.values()
        own = columns.pack([[list(one.names), list(one.whole), one.positions] for one in leaves])
        fields = (
            fields_text(self.root),
            f'"leader": {self.leader}',
            f'"is_split": {json_text(self.is_split)}',
            f'"parts": [{json_lines(map(_leaf_text, leaves))}]',
            f'"own": [{json_lines(map(json_text, own))}]',
            f'"cuts": [{json_lines(map(json_text, self.cuts.to_json()))}]',
        )
        return sealed(TREE_VERSION, ",\n".join(fields))

    def joined(self, parts: Sequence[Manifest]) -> Manifest:
        """The leader's and these ranks' records as one; ``parts`` are the ranks' own."""
        leaders_first = sorted(parts, key=lambda part: (self.leader not in part.ranks, *part.ranks))
        own = {rank: objects for part in parts for rank, objects in part.ranks.items()}
        files = tuple(file for part in leaders_first for file in part.files)
        return replace(self.root, files=files, ranks=dict(sorted(own.items())))

    def only_positions(self) -> Manifest:
        """The positions of all ranks, and nothing else."""
        own = {rank: leaf.with_positions for rank, leaf in self.leaves.items()}
        return replace(self.root, objects={}, ranks=own)

    def with_others(self, manifest: Manifest) -> Manifest:
        """``manifest`` with what the root says of ranks whose records are not in it.

        These are the positions, and the names of the objects.
        """
        others = {
            rank: {**leaf.stub, **leaf.with_positions}
            for rank, leaf in self.leaves.items()
            if rank not in manifest.ranks
        }
        return replace(manifest, ranks=dict(sorted({**manifest.ranks, **others}.items())))


def check_outline(outline: Outline, *, of: Manifest, rank: int) -> None:
    """PersistError unless a record is the rank's, of the checkpoint that the leader commits."""
    for what, expected, found in (
        ("step", of.step, outline.step),
        ("attempt", of.attempt, outline.attempt),
        ("world", of.world, outline.world),
        ("rank", rank, outline.rank),
    ):
        require_same(of, rank, what, expected, found)
    if rank not in of.ranks:  # the leader also writes what all ranks share
        check_names(of, outline.files, rank)


def tile(leaders: Manifest, outlines: Iterable[Outline]) -> bool:
    """Whether the shards of all ranks are known to tile every tensor that the leader lists.

    If not, they may still do so: then `parts.check_shards` decides. So it does where shards are not
    listed, or are of what the leader has whole.
    """
    files = {file.name: {entry.name for entry in file.tensors} for file in leaders.files}
    listed = []
    for name, key, dtype, shape in listed_tensors(leaders):
        if any(key in files.get(file, ()) for file in shared_files_of(name)):
            return False
        listed.append(Shard.whole(name, key, dtype, shape))
    return add_up((outline.measure for outline in outlines), measure(listed))


def decode_record(data: bytes, *, path: Path | str) -> Manifest | Tree:
    """The record in ``data``, of any version; raises as `Manifest.decode` does."""
    if sealed_version(data, path=path) < TREE_VERSION:
        return Manifest.decode(data, path=path)
    try:
        with gc_paused():
            return _tree_of(as_object(load_json(data), "record"))
    except ManifestError as error:
        raise CorruptCheckpointError(
            str(path), check=error.check, expected=error.expected, got=error.got
        ) from None


def _leaf_text(leaf: Leaf) -> str:
    return json_text([leaf.rank, leaf.num_bytes, leaf.digest, leaf.payload_bytes])


def _tree_of(fields: dict[str, Json]) -> Tree:
    mine = {name: fields.pop(name, None) for name in _FIELDS}
    root = manifest_of(fields, has_ranks=False)
    require_count(mine["leader"], "leader")
    require(type(mine["is_split"]) is bool, "is_split", "true or false", mine["is_split"])
    rows = tuple_of(mine["parts"], partial(tuple_of, convert=lambda value: value))
    require(all(len(row) == 4 for row in rows), "parts", "four values each", rows)
    own = _told("own", lambda: columns.unpack(mine["own"], len(rows)))
    leaves = [_leaf(row, said) for row, said in zip(rows, own, strict=True)]
    ranks = [leaf.rank for leaf in leaves]
    require(ranks == sorted({*ranks}), "parts", "each rank once, ascending", ranks)
    cuts = _told("cuts", lambda: CutIndex.from_json(mine["cuts"], ranks={*ranks}))
    return Tree(root, mine["leader"], dict(zip(ranks, leaves, strict=True)), cuts, mine["is_split"])


def _leaf(row: Sequence[Json], own: Json) -> Leaf:
    said = tuple_of(own, lambda value: value)
    require(len(said) == 3, "own", "names, whole ones and positions", own)
    names, whole, positions = said
    rank, num_bytes, digest, payload_bytes = row
    return Leaf(
        rank,
        num_bytes,
        digest,
        payload_bytes,
        names_of(names),
        names_of(whole),
        as_object(positions, "positions"),
    )


def _told(what: str, read: Callable[[], T]) -> T:
    """``read()``, whose ValueError says what is wrong."""
    try:
        return read()
    except ManifestError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise ManifestError(what, "what belongs to the parts", str(error)) from None
