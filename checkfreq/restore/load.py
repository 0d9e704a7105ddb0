"""``checkfreq.load``: a checkpoint as plain state dicts, without the code that wrote it.

It needs no manager, takes no lock, and changes nothing on disk.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from checkfreq.errors import ConfigError, NoCheckpointError, StorageError, storage_errors
from checkfreq.mirror.reader import MirrorReader
from checkfreq.mirror.settings import Mirror, is_url
from checkfreq.persist.listing import best_in
from checkfreq.restore.restorer import LoadedCheckpoint, Restorer
from checkfreq.snapshot.memory import available_host_bytes
from checkfreq.store.fileops import Kind
from checkfreq.store.manifest import MANIFEST_NAME
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore, step_of

logger = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str] | Mirror,
    *,
    step: int | str | None = None,
    only: Collection[str] | None = None,
    into: Mapping[str, Any] | None = None,
    strict: bool = True,
    rank: int = 0,
) -> dict[str, Any]:
    """Read a checkpoint and return its state dicts, by the names given to ``CFCheckpoint``.

    ``path`` is a run's ``chk_dir``, or one ``step-...`` directory in it, or a mirror: its URL
    ("s3://bucket/run"), or a ``checkfreq.Mirror``, which also has the client's options. Without
    ``step`` the newest checkpoint that validates is read; ``"best:METRIC"`` names the one with the
    lowest value of a metric, ``"best:METRIC:max"`` with the highest. Tensors are on the CPU and own
    their memory; tied weights come back as one tensor, and sharded tensors as whole ones. State
    that each rank had for itself ("rng", and the names given as ``per_rank``) is returned as
    ``rank`` had it.

    ``only`` limits what is returned. ``into`` maps names to live objects, which are loaded in
    place as ``CFManager.restore`` does; with ``strict=False`` what fits is loaded.

    Raises NoCheckpointError, CorruptCheckpointError, MismatchError (nothing was changed), and
    ConfigError for a checkpoint of ``CFStorageWriter``, whose values are pickled.
    """
    from checkfreq.restore.apply import materialise, require_rank

    with storage_errors(f"reading {path}"):
        source, step = _source(path, step)
        if isinstance(step, str):
            step = best_in(source, step)
        found = Restorer(source, before_reading=_require_memory).find(step)
    if found is None:
        raise NoCheckpointError(f"{source.name} holds no checkpoint")
    for rejected in found.rejected:
        logger.warning("step %d does not validate, skipped: %s", rejected.step, rejected.error)
    _refuse_dcp(found, source.name)
    require_rank(found, rank, path=source.name)
    if into is not None:
        _load_into(found, into, source.name, only=only, strict=strict, rank=rank)
    return materialise(found, only=only, path=source.name, rank=rank)


def _source(
    path: str | os.PathLike[str] | Mirror, step: int | str | None
) -> tuple[CheckpointSource, int | str | None]:
    if isinstance(path, Mirror) or is_url(os.fspath(path)):
        return MirrorReader(path if isinstance(path, Mirror) else Mirror(os.fspath(path))), step
    chk_dir, step = _split(Path(path), step)
    return CheckpointStore(chk_dir), step


def _refuse_dcp(found: LoadedCheckpoint, name: str) -> None:
    if any(isinstance(o, dict) and o.get("kind") == "dcp" for o in found.manifest.objects.values()):
        raise ConfigError(
            f"step {found.step} in {name} was written by torch.distributed.checkpoint. If "
            "you know who wrote it, read it with dcp.load(state_dict, storage_reader="
            "CFStorageReader(path, step, trust_pickle=True)), from checkfreq.integrations.dcp"
        )


def _require_memory(num_bytes: int) -> None:
    available = available_host_bytes()
    if available is not None and num_bytes > available:
        text = f"expected memory for {num_bytes} bytes of tensors, found {available} bytes free"
        raise StorageError(errno.ENOMEM, text)


def _load_into(
    found: LoadedCheckpoint,
    into: Mapping[str, Any],
    name: str,
    *,
    only: Collection[str] | None,
    strict: bool,
    rank: int,
) -> None:
    from checkfreq.restore.apply import prepare
    from checkfreq.state.checkpoint import CFCheckpoint

    names = set(into) if only is None else set(into) & set(only)
    chk = CFCheckpoint(rng=False, **{one: into[one] for one in names})
    prepare(chk, found, only=names, strict=strict, path=name, rank=rank).apply()


def _split(path: Path, step: int | str | None) -> tuple[Path, int | str | None]:
    """The run's directory, and the step if ``path`` is the directory of one, or a link to one."""
    path = path.absolute()
    named = step_of(path.name)
    if step is None and named is not None:
        ops = CheckpointStore(path.parent).ops
        if ops.kind(path) is Kind.LINK or ops.exists(path / MANIFEST_NAME):
            return path.parent, named
    return path, step
