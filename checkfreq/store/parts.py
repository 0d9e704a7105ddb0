"""The parts that ranks write of one checkpoint, and their merge into one manifest. Pure.

A part is itself a manifest, ``part-<rank>.json``. It lists the files that the rank wrote and, in
``ranks`` under the rank's number, the JSON of the rank's own objects. That JSON may declare
tensors in the rank's file of an object to be shards of larger tensors::

    "shards": {"layer.weight": [[global shape], [offsets]]}

The leader's ``objects`` may list the same tensors as an object's "sharded_tensors": then at least
one shard of each must be there. Parts that do not fit together are not merged; the error names
the rank, and what was expected and found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from checkfreq.errors import CheckFreqError, PersistError
from checkfreq.store.boxes import Box
from checkfreq.store.cover import Placed, Shape, fault_of
from checkfreq.store.manifest import BUFFERS_ENDING, FROZEN_ENDING, Manifest, TensorEntry
from checkfreq.types import Json

_FROZEN = FROZEN_ENDING.removesuffix(".safetensors")
_BUFFERS = BUFFERS_ENDING.removesuffix(".safetensors")
_STEM_OF_A_RANK = re.compile(r"\.rank-[0-9]{5,9}\Z")


def part_name(rank: int) -> str:
    """File name of a rank's part manifest."""
    return f"part-{rank:05d}.json"


def failure_name(rank: int) -> str:
    """Name of the file in which a rank says why there is no part of it."""
    return f"failed-{rank:05d}.txt"


def file_name(stem: str) -> str:
    """Name of a file of tensors; the stem is an object's name, or from ``stem_of``."""
    return f"{stem}.safetensors"


def frozen_stem_of(name: str) -> str:
    """Stem of the file with those tensors of an object that are not expected to change."""
    return f"{name}{_FROZEN}"


def buffers_stem_of(name: str) -> str:
    """Stem of the file with a module's non-persistent buffers."""
    return f"{name}{_BUFFERS}"


def is_frozen_stem(stem: str) -> bool:
    """Whether a file with that stem holds such tensors. No object has a name that ends so."""
    return stem.endswith(_FROZEN)


def object_of(stem: str) -> str:
    """The object's name, of such a stem or of that of any other file."""
    return stem.removesuffix(_FROZEN).removesuffix(_BUFFERS)


def shared_files_of(name: str) -> tuple[str, ...]:
    """Names of the files that may hold an object's tensors, those of single ranks aside."""
    return tuple(map(file_name, (name, frozen_stem_of(name), buffers_stem_of(name))))


def stem_of(name: str, rank: int) -> str:
    """Stem of the file with an object's tensors that are one rank's own, shards included."""
    return f"{name}.rank-{rank:05d}"


def is_stem_of_a_rank(stem: str) -> bool:
    """Whether a file with that stem holds what is one rank's own: shards, most of the time."""
    return _STEM_OF_A_RANK.search(stem) is not None


def file_of(name: str, rank: int) -> str:
    """Name of that file."""
    return file_name(stem_of(name, rank))


def tied_names(shared: Json, name: str, owns: Iterable[Json]) -> dict[str, list[str]]:
    """The names that are tied to each key of an object.

    ``shared``: what is the same on all ranks of it; ``owns``: the ranks' own objects.
    """
    found: dict[str, list[str]] = {}
    for json in (shared, *(own.get(name, {}) for own in owns)):
        for tied, key in json.get("aliases", {}).items():
            found.setdefault(key, []).append(tied)
    return found


def decode_merged(data: bytes, *, path: object, of: Manifest, rank: int) -> Manifest:
    """The part of ``rank`` in ``data``, which will be merged; ``of`` is the leader's own manifest.

    Raises PersistError unless it is a complete part of the same checkpoint.
    """
    try:
        part = Manifest.decode(data, path=str(path))
    except CheckFreqError as error:
        raise unreadable(of, rank, error) from error
    for what, expected, found in (
        ("step", of.step, part.step),
        ("attempt", of.attempt, part.attempt),
        ("world", of.world, part.world),
        ("ranks", [rank], list(part.ranks)),
        ("objects", [], list(part.objects)),
    ):
        require_same(of, rank, what, expected, found)
    return part


def unreadable(of: Manifest, rank: int, error: Exception) -> PersistError:
    """The error for a part that is damaged."""
    return _refusal(of, f"the part of rank {rank} cannot be read: {error}")


def require_same(of: Manifest, rank: int, what: str, expected: object, found: object) -> None:
    """PersistError for the part of another checkpoint."""
    if found != expected:
        raise _refusal(of, f"the part of rank {rank} says {what} {found}, expected {expected}")


def check_sizes(
    of: Manifest, files: Mapping[str, int], sizes: Mapping[str, int], *, rank: int
) -> None:
    """PersistError unless each of a rank's files is in ``sizes`` with the size it says."""
    for name, num_bytes in files.items():
        found = sizes.get(name)
        if found != num_bytes:
            got = "no such file" if found is None else f"{found} bytes"
            raise _refusal(of, f"rank {rank}'s {name}: expected {num_bytes} bytes, found {got}")


def check_names(of: Manifest, names: Iterable[str], rank: int) -> None:
    """PersistError unless names of files end in the rank: no two ranks write the same file."""
    ending = file_of("", rank)
    for name in names:
        if not name.endswith(ending):
            expected = f"expected a name ending in {ending}"
            raise _refusal(of, f"rank {rank} wrote a file that is not its own: {expected}: {name}")


def merge(leader: Manifest, parts: Sequence[Manifest]) -> Manifest:
    """Merge the leader's own manifest (its rank in ``ranks``) and the others' parts into one.

    Raises PersistError if two of them have the same file or rank, or if the shards of a tensor
    overlap, contradict each other or leave elements out. Where other ranks commit into other
    directories, elements are always missing here, and that is not checked.
    """
    ranks = dict(leader.ranks)
    files = list(leader.files)
    for part in parts:
        ((rank, own),) = part.ranks.items()
        if rank in ranks:
            _refuse(leader, f"expected one part of rank {rank}, found two")
        ranks[rank] = own
        check_names(part, (file.name for file in part.files), rank)
        files.extend(part.files)
    merged = replace(leader, files=tuple(files), ranks=dict(sorted(ranks.items())))
    check_shards(merged)
    return merged


def check_shards(manifest: Manifest) -> None:
    """PersistError unless the shards of every sharded tensor fit together."""
    # With a directory per node, this manifest has the parts of some ranks only.
    whole = len(manifest.ranks) == manifest.world
    tensors = _by_tensor(manifest)
    for name, key, _, _ in listed_tensors(manifest) if whole else ():
        if (name, key) not in tensors:
            problem = "expected shards, found none"
            _refuse(manifest, f"tensor {key!r:.80} of {name!r:.80}: {problem} from any rank")
    for (name, key), shards in tensors.items():
        where = f"tensor {key!r:.80} of {name!r:.80}"
        if any(shard.whole_file for shard in shards):
            rank = shards[0].placed.rank
            _refuse(manifest, f"{where}: expected whole or in shards, found both (rank {rank})")
        for what, values in (
            ("shape", [list(shard.shape) for shard in shards]),
            ("dtype", [shard.dtype for shard in shards]),
        ):
            _same(manifest, f"{where}: {what}", shards, values)
        fault = fault_of(shards[0].shape, [shard.placed for shard in shards], whole=whole)
        if fault:
            _refuse(manifest, f"{where}: {fault}")


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard of a tensor of ``shape``; ``whole_file``: the object's file has the tensor too."""

    placed: Placed
    shape: Shape
    dtype: str
    whole_file: bool


def _by_tensor(manifest: Manifest) -> dict[tuple[str, str], list[_Shard]]:
    tensors = {file.name: {entry.name: entry for entry in file.tensors} for file in manifest.files}
    found: dict[tuple[str, str], list[_Shard]] = {}
    for rank, name, key, shape, offsets in declared_shards(manifest):
        entry = shard_entry(manifest, tensors, rank, name, key)
        whole_file = any(key in tensors.get(file, {}) for file in shared_files_of(name))
        shard = _Shard(Placed(rank, Box(offsets, entry.shape)), shape, entry.dtype, whole_file)
        found.setdefault((name, key), []).append(shard)
    return found


def shard_entry(
    manifest: Manifest,
    tensors: Mapping[str, Mapping[str, TensorEntry]],
    rank: int,
    name: str,
    key: str,
) -> TensorEntry:
    """The entry of a shard that a rank declares; ``tensors``: of each file, by key.

    PersistError if the rank has no such tensor.
    """
    entry = tensors.get(file_of(name, rank), {}).get(key)
    if entry is None:
        _refuse(
            manifest,
            f"tensor {key!r:.80} of {name!r:.80}: rank {rank} says that it has a shard; "
            f"expected it in {file_of(name, rank)}, found no such tensor",
        )
    return entry


def declared_shards(manifest: Manifest) -> Iterator[tuple[int, str, str, Shape, Shape]]:
    """(rank, object's name, key, global shape, offsets) of every shard that a rank declares."""
    for rank, own in manifest.ranks.items():
        for name, value in own.items():
            if name.startswith("$"):  # not an object: any key in it may be a user's name
                continue
            shards = value.get("shards", {}) if isinstance(value, dict) else {}
            if not isinstance(shards, dict):
                _refuse(manifest, f"rank {rank}'s {name!r:.80}: shards: expected an object")
            for key, place in shards.items():
                if not _is_place(place):
                    problem = f"expected [[global shape], [offsets]], found {place!r:.80}"
                    _refuse(manifest, f"rank {rank}'s {name!r:.80}: shard {key!r:.80}: {problem}")
                yield rank, name, key, tuple(place[0]), tuple(place[1])


def listed_tensors(manifest: Manifest) -> Iterator[tuple[str, str, str, Shape]]:
    """(object's name, key, dtype, shape) of the tensors that the leader lists as sharded."""
    for name, value in manifest.objects.items():
        if isinstance(value, dict):
            for key, (dtype, shape) in value.get("sharded_tensors", {}).items():
                yield name, key, dtype, tuple(shape)


def _is_place(value: Json) -> bool:
    """Two lists of whole numbers."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(
        isinstance(numbers, list | tuple) and all(type(n) is int and n >= 0 for n in numbers)
        for numbers in value
    )


def _same(
    manifest: Manifest, what: str, shards: Sequence[_Shard], values: Sequence[object]
) -> None:
    for shard, value in zip(shards, values, strict=True):
        if value != values[0]:
            expected = f"{values[0]}, as rank {shards[0].placed.rank} says"
            _refuse(
                manifest, f"{what}: expected {expected}, found {value} of rank {shard.placed.rank}"
            )


def _refuse(manifest: Manifest, fault: str) -> NoReturn:
    raise _refusal(manifest, fault)


def _refusal(manifest: Manifest, fault: str) -> PersistError:
    text = f"step {manifest.step} was not committed: {fault}"
    return PersistError(text, step=manifest.step, phase="parts")
