"""Making a folder durable, and everything in one."""

from __future__ import annotations

from pathlib import Path

from checkfreq.store.fileops import FileOps, Kind


def ensure_folder(ops: FileOps, folder: Path) -> None:
    """Make a folder and its missing parents, and their entries durable."""
    if ops.is_dir(folder):
        return
    ensure_folder(ops, folder.parent)
    ops.mkdir(folder, parents=True)  # another rank may have made it meanwhile
    ops.sync_dir(folder.parent)


def sync_tree(ops: FileOps, folder: Path) -> None:
    """Make every file below a folder durable, and every name; links are not followed."""
    for name, kind in ops.scan(folder).items():
        if kind is Kind.FILE:
            ops.sync_file(folder / name)
        elif kind is Kind.DIRECTORY:
            sync_tree(ops, folder / name)
    ops.sync_dir(folder)
