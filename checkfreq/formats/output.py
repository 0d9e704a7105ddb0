"""Output appears whole or not at all, and over something that is there only if that is asked."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from checkfreq.errors import ConfigError, storage_errors
from checkfreq.helpers.folders import sync_tree
from checkfreq.helpers.saving import write_atomically
from checkfreq.helpers.stream import PayloadStream
from checkfreq.store.fileops import LocalFileOps


def require_free(path: Path, *, overwrite: bool) -> None:
    """Raise ConfigError if something is there already."""
    ops = LocalFileOps(path.parent)
    with storage_errors(f"looking at {path}"):
        taken = ops.exists(path)
    if taken and not overwrite:
        raise ConfigError(
            f"{path} is there already: expected a new path. Pass another one, or overwrite=True"
        )


def write_file(path: Path, write: Callable[[PayloadStream], object], *, overwrite: bool) -> None:
    """Write a file, whole or not at all."""
    require_free(path, overwrite=overwrite)
    write_atomically(path, write, what=f"writing {path}")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of ``folder`` if the block ends without an error.

    Where there was one, a crash in the wrong moment leaves it under the name of the new one with
    ``.old`` at the end.
    """
    ops = LocalFileOps(folder.parent)
    temporary = folder.with_name(f".{folder.name[:30]}.{uuid.uuid4().hex}.saving")
    with storage_errors(f"writing {folder}"):
        ops.mkdir(temporary)
        try:
            yield temporary
            sync_tree(ops, temporary)
            _swap(ops, temporary, folder)
        except BaseException:
            with contextlib.suppress(OSError):
                ops.remove_tree(temporary)
            raise


def _swap(ops: LocalFileOps, new: Path, folder: Path) -> None:
    old = new.with_suffix(".old")
    had_one = ops.exists(folder)
    if had_one:
        ops.rename(folder, old)
    ops.rename(new, folder)
    ops.sync_dir(folder.parent)
    if had_one:
        ops.remove_tree(old)
