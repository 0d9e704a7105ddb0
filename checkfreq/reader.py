"""``checkfreq.load``: a checkpoint as plain state dicts, without the run that wrote it.

No manager, no lock, no training code, and nothing on disk is changed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from checkfreq.errors import ConfigError, NoCheckpointError
from checkfreq.restore import Found, Restorer, plan_restore

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-([0-9]{1,18})")


def load(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    only: Collection[str] | None = None,
    into: Mapping[str, Any] | None = None,
    strict: bool = True,
    rank: int = 0,
) -> dict[str, Any]:
    """Read a checkpoint directory and return its state dicts by tracked name.

    ``path`` is a run's ``chk_dir``, or one ``step-...`` directory in it. Without ``step`` the
    newest checkpoint that validates is read. Tensors are on the CPU and own their memory;
    names that were tied come back as the same tensor, and shards as whole tensors. What each
    rank had of its own ("rng", names given as ``per_rank``) is returned as ``rank`` had it.
    ``only`` limits what is returned. ``into`` maps tracked names to live objects, which are
    loaded in place as ``CFManager.restore`` would; ``strict=False`` then loads what fits.

    Raises NoCheckpointError, CorruptCheckpointError, MismatchError (nothing was changed), and
    ConfigError for what ``CFStorageWriter`` wrote: values in it are pickled.
    """
    from checkfreq.snapshot.apply import materialise, require_rank

    chk_dir, step = _split(Path(path), step)
    found = Restorer(chk_dir).find(step)
    if found is None:
        raise NoCheckpointError(f"{chk_dir} holds no checkpoint")
    for rejected in found.rejected:
        logger.warning("step %d does not validate, skipped: %s", rejected.step, rejected.error)
    _refuse_dcp(found, chk_dir)
    loaded = found.loaded()
    require_rank(loaded, rank, path=str(chk_dir))
    if into is not None:
        _load_into(found, into, chk_dir, only=only, strict=strict, rank=rank)
    return materialise(loaded, only=only, path=str(chk_dir), rank=rank)


def _refuse_dcp(found: Found, chk_dir: Path) -> None:
    if any(isinstance(o, dict) and o.get("kind") == "dcp" for o in found.manifest.objects.values()):
        raise ConfigError(
            f"step {found.step} in {chk_dir} was written by torch.distributed.checkpoint: read it "
            "with dcp.load(state_dict, storage_reader=CFStorageReader(path, step, "
            "trust_pickle=True)), of checkfreq.integrations.dcp, if you know who wrote it"
        )


def _load_into(
    found: Found,
    into: Mapping[str, Any],
    chk_dir: Path,
    *,
    only: Collection[str] | None,
    strict: bool,
    rank: int,
) -> None:
    from checkfreq.checkpoint import CFCheckpoint

    names = set(into) if only is None else set(into) & set(only)
    chk = CFCheckpoint(rng=False, **{name: into[name] for name in names})
    plan = plan_restore(found, chk, path=chk_dir, only=names, exclude=(), strict=strict, rank=rank)
    plan.apply()


def _split(path: Path, step: int | None) -> tuple[Path, int | None]:
    named = _STEP.fullmatch(path.name)
    if step is None and named is not None and (path / "manifest.json").exists():
        return path.parent, int(named[1])
    return path, step
