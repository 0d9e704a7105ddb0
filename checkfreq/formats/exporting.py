"""One of our checkpoints as conversions read it: verified, and walked back from if damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from checkfreq.errors import ConfigError, NoCheckpointError, storage_errors
from checkfreq.mirror.settings import Mirror
from checkfreq.restore.apply import require_rank
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.load import log_rejected, refuse_dcp, source_of
from checkfreq.restore.restorer import Restorer
from checkfreq.state.capture import GRADIENTS, POSITIONS
from checkfreq.state.saved import SavedObject, new_tensor
from checkfreq.state.saved_tensor import SavedTensor
from checkfreq.state.tensors import DTYPES, usable_device
from checkfreq.types import Json

#: A ``chk_dir``, one ``step-...`` directory in it, or a mirror.
ChkDir = str | os.PathLike[str] | Mirror

T = TypeVar("T")

#: What describes how ranks had divided an object: an export has it whole; and buffers that an
#: export leaves out.
_LEFT_OUT = ("own_tensors", "sharded_tensors", "shards", "split_dims", "non_persistent")


def export(
    chk_dir: ChkDir, step: int | str | None, rank: int, use: Callable[[FoundCheckpoint], T]
) -> tuple[FoundCheckpoint, T]:
    """``use`` a step, or the newest that validates; if it finds damage, the one before.

    Raises what `checkfreq.load` raises.
    """
    with storage_errors(f"reading {chk_dir}"):
        source, number = source_of(chk_dir, step)

    def check(found: FoundCheckpoint) -> T:
        refuse_dcp(found, source.name)
        require_rank(found, rank, path=source.name)
        return use(found)

    done = Restorer(source).find(number, check)
    if done is None:
        raise NoCheckpointError(f"{source.name} holds no checkpoint")
    log_rejected(done[0])
    return done


def names_in(found: FoundCheckpoint, rank: int) -> list[str]:
    """The objects that an export has: all but the place in the data and what an import added."""
    present = found.names(rank) - {POSITIONS, GRADIENTS}
    own = found.manifest.ranks.get(rank, {})
    names = [name for name in (*found.manifest.objects, *sorted(own)) if name in present]
    objects = {**found.manifest.objects, **own}
    return [name for name in dict.fromkeys(names) if not objects[name].get("added")]


def chosen(found: FoundCheckpoint, name: str | None, rank: int, *, path: str) -> str:
    """The object to export: ``name``, or the only module. Raises ConfigError."""
    there = names_in(found, rank)
    modules = [one for one in there if _kind(found, one, rank) == "module"]
    if name is None and len(modules) == 1:
        return modules[0]
    if name not in there:
        expected = f"one of {', '.join(there)}" if there else "an object"
        raise ConfigError(f"{path}: name={name!r}: expected {expected}: the object to convert")
    return name


def _kind(found: FoundCheckpoint, name: str, rank: int) -> Json:
    own = found.manifest.ranks.get(rank, {}).get(name, {})
    return (own if "kind" in own else found.manifest.objects.get(name, {})).get("kind")


def saved_in(found: FoundCheckpoint, name: str, rank: int, *, path: str) -> SavedObject:
    """An object as an export has it: without buffers that are no part of a state dict."""
    saved = found.saved(name, path=path, rank=rank)
    for key in saved.field("non_persistent", []):
        saved.records.pop(key, None)
    return saved


def json_of(saved: SavedObject) -> dict[str, Json]:
    """An object's JSON, without what describes how ranks had divided it."""
    return {key: value for key, value in saved.json.items() if key not in _LEFT_OUT}


def read_tensor(found: FoundCheckpoint, record: SavedTensor) -> Tensor:
    """All of a tensor, verified."""
    made = new_tensor(record.shape, DTYPES[record.dtype], usable_device("cpu"))
    if placements := list(record.placements(made)):
        found.reader.read(placements)
    return made
