"""``torch.save`` files, written and read so that ``weights_only=True`` is enough."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from checkfreq.errors import ConfigError, CorruptCheckpointError, storage_errors
from checkfreq.formats.exporting import ChkDir, chosen, export, names_in
from checkfreq.formats.importing import Imported, Target, commit, entries_of
from checkfreq.formats.output import require_free, write_file
from checkfreq.formats.plain import MALFORMED, plain_in, to_plain
from checkfreq.restore.apply import materialise
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.load import require_memory
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.store.fileops import user_file, user_path


def to_torch_save(
    chk_dir: ChkDir,
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    name: str | None = None,
    rank: int = 0,
    overwrite: bool = False,
) -> int:
    """Write a checkpoint to a file for ``torch.load(path)``; returns its step.

    The file holds what `checkfreq.load` returns, the state dicts by name; with ``name`` that state
    dict alone. ``weights_only=True``, torch's default, takes it: what that refuses (NumPy arrays,
    deques, paths, ...) is a dict with a tag, ``{"$deque": [...]}``. Needs memory for one state. The
    place in the data and pending gradients are not in it. ``step`` and ``rank`` are those of
    `checkfreq.load`.

    Raises what `checkfreq.load` raises, and ConfigError if ``path`` is there already.
    """
    target = user_path(path)
    require_free(target, overwrite=overwrite)

    def read(found: FoundCheckpoint) -> dict[str, Any]:
        where = f"step {found.step} of {chk_dir}"
        only = names_in(found, rank) if name is None else [chosen(found, name, rank, path=where)]
        return materialise(found, only=only, path=where, rank=rank, require_memory=require_memory)

    found, state = export(chk_dir, step, rank, read)
    content = to_plain(state if name is None else state[name], "state")
    write_file(target, lambda stream: torch.save(content, stream), overwrite=overwrite)  # type: ignore[arg-type]
    return found.step


def from_torch_save(
    path: str | os.PathLike[str],
    chk_dir: str | os.PathLike[str],
    *,
    like: CFCheckpoint | None = None,
    names: Mapping[str, str] | None = None,
    step: int = 0,
    overwrite: bool = False,
) -> int:
    """Make a ``torch.save`` file a checkpoint of step ``step`` in ``chk_dir``; returns the step.

    Each entry of the file becomes an object; a file with nothing but weights becomes ``model``.
    ``like`` is the CFCheckpoint that will restore it: exactly what it tracks is imported, and the
    classes and ties that a file does not tell are taken from its live objects, which are not
    changed. Optimizers and schedulers can be restored only if it was given. ``names`` says what an
    object is called in the file: ``{"model": "model_state_dict"}``.

    The file is read with ``weights_only=True``: whatever needs more is refused. It is mapped, so
    that one tensor at a time is in memory. Random generators, if the file has none, are those of
    this process.

    Raises ConfigError for a file that must be unpickled, for entries that are not there, and if the
    step is there already (``overwrite`` sets it and later ones aside); CorruptCheckpointError for a
    damaged file; StateError for what cannot be kept.
    """
    file = str(user_file(path))
    objects = entries_of(plain_in(_read(file), file), names=names, like=like, path=file)
    return commit(Imported(objects), Target(chk_dir, step, like, overwrite))


def _read(path: str) -> Any:
    with storage_errors(f"reading {path}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
        try:
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except (RuntimeError, ValueError):  # a format before that of torch 1.6
                return torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise _refused(path, error) from None
        except (*MALFORMED, AssertionError, EOFError) as error:
            raise CorruptCheckpointError(
                path,
                check="torch.load",
                expected="a file of torch.save",
                got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            ) from None


def _refused(path: str, error: Exception) -> ConfigError:
    reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error))
    return ConfigError(
        f"{path} is not read: expected what torch.load(weights_only=True) takes, found what needs "
        f"its author's code or is no such file ({reason.strip():.200}). Unpickling can run any "
        "code that the author put there. If you trust it, read it with weights_only=False in a "
        "script of yours, and save tensors, numbers and plain containers alone"
    )
