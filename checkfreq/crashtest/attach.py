"""Where a manager meets the crash test that it runs under; outside of one, nothing is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from checkfreq.config import CFConfig
from checkfreq.crashtest.plan import life_folder, plan_in
from checkfreq.session.session import Session

if TYPE_CHECKING:
    from checkfreq.crashtest.recorder import Recorder


def redirected(
    chk_dir: str | bytes | os.PathLike[str], config: CFConfig
) -> tuple[str | bytes | os.PathLike[str], CFConfig]:
    """A directory of the crash test's own, and the config for it; as they are outside of one.

    The user's directory and mirror are not touched, and no job is put back into a queue.
    """
    folder = life_folder()
    if not folder:
        return chk_dir, config
    from xxhash import xxh3_64_hexdigest

    name = f"chk-{xxh3_64_hexdigest(os.fsencode(chk_dir))[:8]}"
    return Path(plan_in(folder).home) / name, replace(config, mirror=None, requeue=False)


def recorder_for(session: Session, *, save: Callable[..., None]) -> Recorder | None:
    """What records this manager's run; None outside of a crash test."""
    if not life_folder():
        return None
    from checkfreq.crashtest import hooks

    recorder = hooks.install()
    recorder.attach(session.chk, rank=session.role.rank, save=save)
    return recorder
