"""Where a manager meets the crash test that it runs under; outside of one, nothing is imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from checkfreq.crashtest.plan import life_folder, plan_in
from checkfreq.session.arguments import Arguments
from checkfreq.session.session import Session

if TYPE_CHECKING:
    from checkfreq.crashtest.recorder import Recorder


def redirected(arguments: Arguments) -> Arguments:
    """The arguments with a directory of the crash test's own; as they are outside of one.

    The user's directory and mirror are not touched, and no job is put back into a queue.
    """
    folder = life_folder()
    if not folder:
        return arguments
    from xxhash import xxh3_64_hexdigest

    name = f"chk-{xxh3_64_hexdigest(os.fsencode(arguments.chk_dir))[:8]}"
    config = replace(arguments.config, mirror=None, requeue=False)
    return replace(arguments, chk_dir=Path(plan_in(folder).home) / name, config=config)


def recorder_for(session: Session, *, save: Callable[..., None]) -> Recorder | None:
    """What records this manager's run; None outside of a crash test."""
    if not life_folder():
        return None
    from checkfreq.crashtest import hooks

    recorder = hooks.install()
    recorder.attach(session.chk, rank=session.role.rank, save=save)
    return recorder
