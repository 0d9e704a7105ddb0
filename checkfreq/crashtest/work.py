"""The folder of a crash test: made, given to the trial, and removed with every process in it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from checkfreq.crashtest.life import end_all
from checkfreq.crashtest.trial import Settings, Trial
from checkfreq.crashtest.verdict import Verdict
from checkfreq.errors import ConfigError


def tested(settings: Settings, *, keep: str | None, say: Callable[[str], None]) -> Verdict:
    """The verdict on a command. ``keep``: a new folder that is left there.

    Raises ConfigError where the script fails by itself, or cannot be tested.
    """
    work = _made(Path(keep).absolute()) if keep else Path(tempfile.mkdtemp(prefix="crashtest-"))
    try:
        return Trial(replace(settings, work=work), say=say).run()
    finally:
        end_all(work)
        if not keep:
            shutil.rmtree(work, ignore_errors=True)


def _made(folder: Path) -> Path:
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"--keep {folder}: expected a new or an empty folder, found files in it")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
