"""Paths that users give: the directory of a run, or one step in it."""

from __future__ import annotations

import os
from pathlib import Path

from checkfreq.store.fileops import user_path
from checkfreq.store.store import step_of


def split_path(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """The run's directory, and the step if the path ends in one."""
    given = user_path(path)
    step = step_of(given.name)
    return (given, None) if step is None else (given.parent, step)
