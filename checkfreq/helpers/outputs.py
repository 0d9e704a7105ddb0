"""Files that a command of the user's writes: outside checkpoint directories, and through no link.

In a directory that others may write to, a link can lie under any name, and so can a directory of
checkpoints in which the working directory happens to be.
"""

from __future__ import annotations

from pathlib import Path

from checkfreq.errors import ConfigError
from checkfreq.store.fileops import Kind, LocalFileOps, user_path
from checkfreq.store.store import step_of


def write_output(path: Path, data: bytes, *, what: str) -> None:
    """Replace the file as a whole. ``what``: the option that named it, for messages.

    Raises ConfigError for a path in a checkpoint directory, and for anything but a regular file.
    """
    require_outside(path, what=what)
    path = user_path(path)
    ops = LocalFileOps(path.parent)
    kind = ops.kind(path)
    if kind not in (None, Kind.FILE):
        raise ConfigError(
            f"{what} {path} is {kind.value}: expected a regular file, or a path where nothing is"
        )
    ops.replace_file(path, data, sync=False)


def require_outside(path: Path, *, what: str) -> None:
    """Raise ConfigError if the path leads into a checkpoint directory."""
    for folder in (user_path(path).parent / "x").resolve().parents:
        if _holds_checkpoints(folder):
            raise ConfigError(
                f"{what} {path} is in {folder}, a checkpoint directory, in which only runs write: "
                "expected a path outside it"
            )


def _holds_checkpoints(folder: Path) -> bool:
    try:
        names = LocalFileOps(folder).scan(folder, beginning=("step-", ".lock", "events."))
    except OSError:  # not there yet, or not to be listed
        return False
    return {".lock", "events.jsonl"} <= {*names} or any(step_of(n) is not None for n in names)
