"""``checkfreq.load``: a checkpoint as plain state dicts, without the code that wrote it.

It needs no manager, takes no lock, and changes nothing on disk.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checkfreq.errors import (
    CheckFreqError,
    ConfigError,
    NoCheckpointError,
    StorageError,
    storage_errors,
)
from checkfreq.mirror.reader import MirrorReader
from checkfreq.mirror.settings import Mirror, is_url
from checkfreq.persist.listing import best_in
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.restorer import Restorer
from checkfreq.snapshot.memory import available_host_bytes
from checkfreq.store.fileops import Kind, user_path
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
    place as ``CFManager.restore`` does, but for ``requires_grad`` and ``training`` flags, which
    stay; with ``strict=False`` what fits is loaded. The result has
    their own state dicts then, which share their memory.

    Raises NoCheckpointError, CorruptCheckpointError (it says so if live objects hold parts of a
    damaged checkpoint), MismatchError (nothing was changed), and ConfigError for a checkpoint of
    ``CFStorageWriter``, whose values are pickled.
    """
    with storage_errors(f"reading {path}"):
        source, number = source_of(path, step)
    chosen = _Choice(source.name, only, rank)
    if into is None:
        done = Restorer(source).find(number, chosen.read)
    else:
        done = _load_into(Restorer(source), number, into, chosen, strict=strict)
    if done is None:
        raise NoCheckpointError(f"{source.name} holds no checkpoint")
    found, state = done
    log_rejected(found)
    return state


def log_rejected(found: FoundCheckpoint) -> None:
    """Say which newer steps do not validate, or cannot be read."""
    for rejected in found.rejected:
        logger.warning("step %d is skipped: %s", rejected.step, rejected.error)


@dataclass(frozen=True, slots=True)
class _Choice:
    """What is read of a checkpoint in ``name``: state as ``rank`` had it, of names in ``only``."""

    name: str
    only: Collection[str] | None
    rank: int

    def read(self, found: FoundCheckpoint, without: Collection[str] = ()) -> dict[str, Any]:
        """State dicts of all that was chosen, but not of those in ``without``."""
        from checkfreq.restore.apply import materialise

        self.require(found)
        return materialise(
            found,
            only=self.only,
            without=without,
            path=self.name,
            rank=self.rank,
            require_memory=require_memory,
        )

    def require(self, found: FoundCheckpoint) -> None:
        """Raise ConfigError for what cannot be read without unpickling, or an unknown rank."""
        from checkfreq.restore.apply import require_rank

        refuse_dcp(found, self.name)
        require_rank(found, self.rank, path=self.name)


def source_of(
    path: str | os.PathLike[str] | Mirror, step: int | str | None
) -> tuple[CheckpointSource, int | None]:
    """Where to read, and the step if one is named; see `load`."""
    source, step = _named_source(path, step)
    return source, best_in(source, step) if isinstance(step, str) else step


def _named_source(
    path: str | os.PathLike[str] | Mirror, step: int | str | None
) -> tuple[CheckpointSource, int | str | None]:
    if isinstance(path, Mirror) or is_url(os.fsdecode(path)):
        return MirrorReader(path if isinstance(path, Mirror) else Mirror(os.fsdecode(path))), step
    chk_dir, step = _split(user_path(path), step)
    return CheckpointStore(chk_dir), step


def refuse_dcp(found: FoundCheckpoint, name: str) -> None:
    """Raise ConfigError for what cannot be read without unpickling."""
    if any(isinstance(o, dict) and o.get("kind") == "dcp" for o in found.manifest.objects.values()):
        raise ConfigError(
            f"step {found.step} in {name} was written by torch.distributed.checkpoint. If "
            "you know who wrote it, read it with dcp.load(state_dict, storage_reader="
            "CFStorageReader(path, step, trust_pickle=True)), from checkfreq.integrations.dcp"
        )


def require_memory(num_bytes: int) -> None:
    """Raise StorageError (ENOMEM) unless there is so much memory on the host."""
    available = available_host_bytes()
    if available is not None and num_bytes > available:
        text = f"expected memory for {num_bytes} bytes of tensors, found {available} bytes free"
        raise StorageError(errno.ENOMEM, text)


def _load_into(
    restorer: Restorer,
    step: int | None,
    into: Mapping[str, Any],
    chosen: _Choice,
    *,
    strict: bool,
) -> tuple[FoundCheckpoint, dict[str, Any]] | None:
    from checkfreq.restore.apply import prepare
    from checkfreq.restore.in_place import InPlace
    from checkfreq.state.checkpoint import CFCheckpoint

    names = set(into) if chosen.only is None else set(into) & set(chosen.only)
    chk = CFCheckpoint(rng=False, **{one: into[one] for one in names})
    compare = partial(
        prepare,
        chk,
        only=names,
        strict=strict,
        path=chosen.name,
        rank=chosen.rank,
        resumes=False,
    )
    loading = InPlace(compare, require_memory=require_memory)

    def use(found: FoundCheckpoint) -> dict[str, Any]:
        chosen.require(found)
        plan = loading.look(found)
        state = chosen.read(found, without=names)
        loading.change(plan)
        return {**state, **{name: _state_of(into[name]) for name in names}}

    try:
        return restorer.find(step, use)
    except CheckFreqError as error:
        raise loading.told(error) from error


def _state_of(live: Any) -> Any:
    return live if isinstance(live, dict | list) else live.state_dict()


def _split(path: Path, step: int | str | None) -> tuple[Path, int | str | None]:
    """The run's directory, and the step if ``path`` is the directory of one, or a link to one."""
    named = step_of(path.name)
    if step is None and named is not None:
        ops = CheckpointStore(path.parent).ops
        if ops.kind(path) is Kind.LINK or ops.exists(path / MANIFEST_NAME):
            return path.parent, named
    return path, step
