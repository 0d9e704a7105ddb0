"""What users call a checkpoint: the directory of a run, or one step in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

_STEP = re.compile(r"step-([0-9]{8,18})")


def split_path(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """The run's directory, and the step if the path ends in one."""
    path = Path(path)
    match = _STEP.fullmatch(path.name)
    return (path, None) if match is None else (path.parent, int(match[1]))
