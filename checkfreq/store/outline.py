"""A rank's record where the records of many ranks make a tree, and the outline it begins with.

Such a record is a rank's manifest behind a line that says of it what others need to know::

    {"format_version": 4, "digest": "<of the whole>",
    "outline": {"rank": 7, "files": {...}, ...},
    "record":
    {"format_version": 3, ...}}

The outline is made of the manifest, and whoever decodes the whole compares the two. The leader
parses the outline alone. Pure: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkfreq.errors import CheckFreqError, CorruptCheckpointError
from checkfreq.store.boxes import Box
from checkfreq.store.checks import (
    ManifestError,
    as_object,
    load_json,
    require,
    require_count,
    tuple_of,
)
from checkfreq.store.cuts import Cut, cuts_of
from checkfreq.store.manifest import (
    POSITIONS,
    Manifest,
    json_text,
    seal_of,
    sealed,
    sealed_version,
)
from checkfreq.store.parts import declared_shards, shard_entry
from checkfreq.store.tiling import Shard, measure
from checkfreq.types import Json

_OUTLINE = b'"outline": '
_RECORD = b',\n"record":\n'
_END = b"}\n"


@dataclass(frozen=True, slots=True)
class Outline:
    """What others need to know of a rank's record without parsing it.

    ``files``: their sizes in bytes. ``names``: of the rank's own objects; ``whole``: those of them
    of which no other rank has a share. ``is_split``: state that is the same on all ranks is divided
    among them, in shards that the leader does not list. ``measure``: see `tiling`.
    """

    rank: int
    step: int
    attempt: str
    world: int
    files: Mapping[str, int]
    names: tuple[str, ...]
    whole: tuple[str, ...]
    is_split: bool
    positions: Json
    cuts: tuple[Cut, ...]
    measure: int

    @classmethod
    def of(cls, part: Manifest, *, is_split: bool = False) -> Outline:
        """The outline of a part; PersistError if it says that it has shards that it has not."""
        ((rank, own),) = part.ranks.items()
        shards = list(_shards_of(part))
        names = tuple(name for name in own if name != POSITIONS)
        return cls(
            rank=rank,
            step=part.step,
            attempt=part.attempt,
            world=part.world,
            files={file.name: file.num_bytes for file in part.files},
            names=names,
            whole=tuple(n for n in names if isinstance(own[n], dict) and "kind" in own[n]),
            is_split=is_split,
            positions=own.get(POSITIONS, {}),
            cuts=tuple(cuts_of((shard.shape, shard.box) for shard in shards)),
            measure=measure(shards),
        )

    def to_json(self) -> Json:
        """As it stands in the record."""
        return {
            "rank": self.rank,
            "step": self.step,
            "attempt": self.attempt,
            "world": self.world,
            "files": self.files,
            "names": self.names,
            "whole": self.whole,
            "is_split": self.is_split,
            "positions": self.positions,
            "cuts": self.cuts,
            "measure": f"{self.measure:x}",
        }

    @classmethod
    def from_json(cls, value: Json) -> Outline:
        """ManifestError for what no record begins with."""
        fields = as_object(value, "outline")
        require(fields.keys() == {*cls.__slots__}, "outline", sorted(cls.__slots__), sorted(fields))
        files = as_object(fields["files"], "files")
        require(type(fields["is_split"]) is bool, "is_split", "true or false", fields["is_split"])
        for number in (fields["rank"], fields["step"], fields["world"], *files.values()):
            require_count(number, "outline")
        return cls(
            **{
                **fields,
                "names": names_of(fields["names"]),
                "whole": names_of(fields["whole"]),
                "positions": as_object(fields["positions"], "positions"),
                "cuts": tuple_of(fields["cuts"], Cut.from_json),
                "measure": _number(fields["measure"]),
            }
        )


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A rank's record as the leader reads it: its outline, length in bytes, and digest."""

    outline: Outline
    num_bytes: int
    digest: str

    @classmethod
    def read(cls, data: bytes, *, path: Path | str) -> RankRecord:
        """Read the outline only, after checking the digest of the whole.

        Raises CorruptCheckpointError if the record is damaged, or is another file.
        """
        sealed_version(data, path=path)
        try:
            begin = data.index(b"\n") + 1
            require(data.startswith(_OUTLINE, begin), "second line", "an outline", "none")
            end = data.index(_RECORD, begin)
            outline = Outline.from_json(load_json(data[begin + len(_OUTLINE) : end]))
        except ManifestError as error:
            raise _corrupt(path, error) from None
        except ValueError:
            raise _corrupt(
                path, ManifestError("lines", "an outline and a record", "none")
            ) from None
        return cls(outline, len(data), seal_of(data))


def encode_part(part: Manifest, *, is_split: bool = False) -> bytes:
    """A rank's record; PersistError if it says that it has shards that it has not."""
    outline = f'"outline": {json_text(Outline.of(part, is_split=is_split).to_json())}'
    return sealed(4, f'{outline},\n"record":\n{part.encode().decode("ascii")}')


def decode_part(data: bytes, *, path: Path | str) -> Manifest:
    """The manifest in a rank's record; CorruptCheckpointError if it is damaged or made up."""
    record = RankRecord.read(data, path=path)
    begin = data.index(_RECORD) + len(_RECORD)
    part = Manifest.decode(data[begin : -len(_END)], path=path)
    try:
        require(len(part.ranks) == 1, "ranks", "one", list(part.ranks))
        made = Outline.of(part, is_split=record.outline.is_split)
        require(made == record.outline, "outline", "that of the record", "another")
    except ManifestError as error:
        raise _corrupt(path, error) from None
    except CheckFreqError as error:
        raise _corrupt(path, ManifestError("shards", "those in the files", str(error))) from None
    return part


def names_of(value: Json) -> tuple[str, ...]:
    """A list of strings; ManifestError for anything else."""
    names = tuple_of(value, lambda name: name)
    require(all(isinstance(name, str) for name in names), "names", "strings", value)
    return names


def _shards_of(part: Manifest) -> Iterator[Shard]:
    files = {file.name: {entry.name: entry for entry in file.tensors} for file in part.files}
    for rank, name, key, shape, offsets in declared_shards(part):
        entry = shard_entry(part, files, rank, name, key)
        yield Shard(name, key, entry.dtype, shape, Box(offsets, entry.shape))


def _number(text: Any) -> int:
    require(isinstance(text, str) and len(text) <= 32, "measure", "a number", text)
    try:
        return int(text, 16)
    except ValueError:
        raise ManifestError("measure", "hexadecimal digits", text) from None


def _corrupt(path: Path | str, error: ManifestError) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        str(path), check=error.check, expected=error.expected, got=error.got
    )
