"""Looks at a directory again and again: its events, its lock, what is being written there.

Only reads. The lock is tried, shared, for an instant, as ``checkfreq run`` does. After a kill the
worker is asked what it holds in memory.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from checkfreq.persist.handover import status
from checkfreq.persist.lock import holder_of
from checkfreq.store.fileops import LocalFileOps
from checkfreq.store.gc_pause import gc_paused
from checkfreq.story.figures import Figures, figures
from checkfreq.story.model import Story
from checkfreq.story.reading import EventReader

_TEMPORARY = re.compile(r"\.tmp-(\d+)-.*")


class Live:
    """One directory. `look` may be called at any pace; each call reads what is new."""

    def __init__(self, chk_dir: Path) -> None:
        self.chk_dir = chk_dir
        self.story = Story()
        self.reader = EventReader(chk_dir)
        self._ops = LocalFileOps(chk_dir, direct=False)

    def look(self, *, now_s: float | None = None) -> Figures:
        """The figures now."""
        with gc_paused():  # of 100,000 events, all are kept: a third of the time went there
            self.story.add_all(self.reader.each())
        run = self.story.run
        return figures(
            self.story,
            now_s=time.time() if now_s is None else now_s,
            is_held=is_held(self.chk_dir),
            being_written_step=self._being_written(),
            memory=status(self.chk_dir, 0) if run is not None and run.how == "killed" else None,
        )

    def _being_written(self) -> int | None:
        try:
            names = self._ops.listdir(self.chk_dir)
        except OSError:
            return None
        found = (_TEMPORARY.fullmatch(name) for name in names)
        return max((int(match[1]) for match in found if match), default=None)


def is_held(chk_dir: Path) -> bool | None:
    """Whether a worker has the directory; None where this process cannot tell."""
    if holder_of(chk_dir) is not None:
        return True
    ops = LocalFileOps(chk_dir, direct=False)
    try:
        if ".lock" not in ops.listdir(chk_dir):
            return None
        os.close(ops.open_to_lock(chk_dir / ".lock"))
    except OSError:  # somebody else's
        return None
    return False
