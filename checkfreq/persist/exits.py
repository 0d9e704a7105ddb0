"""Tells the worker when a trainer ends by itself, or drops its manager, without having closed it.

The worker sees only that it is gone, and would keep the snapshots in memory as after a kill, for a
restart that does not come. An exception that nobody caught is a crash and is treated as one: then
nothing is said.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from dataclasses import dataclass

from checkfreq.persist import protocol as p


@dataclass(slots=True)
class _Line:
    channel: p.Channel | None = None


class LastWord:
    """What is said for ``owner`` when it is freed, or at the exit of the process that made it."""

    def __init__(self, owner: object) -> None:
        self._line = _Line()
        self._finalizer = weakref.finalize(owner, _say, self._line, os.getpid())

    def through(self, channel: p.Channel) -> None:
        """It is said through this channel from now on, which is closed with it."""
        self._line.channel = channel

    def cancel(self) -> None:
        """There is nothing to say any more: the worker was told to close."""
        self._finalizer.detach()


def _say(line: _Line, pid: int) -> None:
    is_crash = getattr(sys, "last_value", None) is not None  # set where a traceback is printed
    if line.channel is None or pid != os.getpid() or is_crash:
        return
    with contextlib.suppress(p.ChannelClosedError):
        line.channel.send(p.KeepNothing())
    line.channel.close()
