"""Fault points: named instants at which a test can kill, fail or pause a process.

The code passes a point by calling ``reach("commit.rename")``; with no script installed that costs
one attribute test. A script is read from the environment variable ``CHECKFREQ_FAULT``, which also
reaches the worker process across ``exec``. It is a list of ``point:action[:hit]`` joined by ``;``.
``hit`` counts passes of that point from 1 (default 1; ``3+``: from the third on; ``*``: every
pass), and ``action`` is one of

* ``kill-self``, ``kill-peer``, ``kill-both``: SIGKILL this process, the other one (trainer or
  worker), or both, the other one first;
* ``raise-ENOSPC``, or any other errno name: raise that OSError at the point;
* ``pause-FILE``: create ``FILE.reached``, then wait until FILE exists, at most 60 s.

``CHECKFREQ_FAULT_LOG`` names a file to which each point is appended as it is passed. Both
variables are read at import, and again by ``reload``.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass

#: Every fault point, in the order in which an undisturbed checkpoint passes them. The trainer
#: passes those under ``meeting.``, ``snapshot.``, ``socket.`` and ``slot.``, the worker all others.
#: Those under ``meeting.`` and ``parts.`` are passed with many ranks only; those under ``mirror.``
#: with a mirror, on its own thread. Those under ``restore.`` belong to no checkpoint being written:
#: whoever restores passes them, on several threads.
POINTS: tuple[str, ...] = (
    "meeting.say",
    "meeting.hear",
    "snapshot.copy_start",
    "snapshot.copy_settled",
    "snapshot.copy_end",
    "socket.send",
    "worker.receive",
    "commit.mkdir",  # a single rank, or the leader
    "parts.join",  # the other ranks
    "commit.write",
    "commit.truncate",
    "commit.sync_payload",
    "parts.write_manifest",  # the other ranks, up to parts.rename
    "parts.sync_manifest",
    "parts.rename",
    "parts.wait",  # the leader from here on
    "parts.merge",
    "commit.write_manifest",
    "commit.sync_manifest",
    "commit.sync_temp_dir",
    "commit.supersede",
    "commit.rename",
    "commit.sync_parent",
    "commit.pointer",
    "worker.reply",
    "socket.receive",
    "slot.release",
    "prune.rename",
    "prune.sync",
    "prune.remove",
    "mirror.claim",  # with a mirror only, from here on
    "mirror.put_piece",
    "mirror.put_manifest",
    "mirror.verify",
    "mirror.put_marker",
    "mirror.uploaded",
    "mirror.remove_marker",
    "mirror.remove_objects",
    "restore.read",  # before each read of a payload
)

#: Those of a hand-over of memory, in the order in which an undisturbed one passes them: ``linger.``
#: the worker, ``handover.`` the new run's trainer.
POINTS_OF_A_HANDOVER: tuple[str, ...] = (
    "linger.listen",
    "handover.ask",
    "linger.offer",
    "handover.take",
    "linger.take",
    "linger.adopted",
    "handover.taken",
)

#: Those of a checkpoint with files that it shares with the one before: after ``commit.mkdir``.
POINTS_OF_A_LINK: tuple[str, ...] = ("commit.link",)

#: Those of a restore in which ranks of one machine share reads: beside ``restore.read``.
POINTS_OF_A_SHARED_READ: tuple[str, ...] = (
    "restore.hand_on",  # before a piece is copied to where the others take it
    "restore.take",  # before one is taken
)

#: The fault points that a run of a single rank passes, and those of its mirror, if it has one.
POINTS_OF_ONE_RANK = tuple(
    p for p in POINTS if not p.startswith(("meeting.", "parts.", "mirror.", "restore."))
)
POINTS_OF_A_MIRROR = tuple(p for p in POINTS if p.startswith("mirror."))

_ALL = (*POINTS, *POINTS_OF_A_HANDOVER, *POINTS_OF_A_LINK, *POINTS_OF_A_SHARED_READ)
_ENV = "CHECKFREQ_FAULT"
_ENV_LOG = "CHECKFREQ_FAULT_LOG"
_PAUSE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Clause:
    action: str
    hit: int
    lasts: bool  # also at every later pass


def _parse(script: str) -> dict[str, _Clause]:
    clauses = {}
    for part in filter(None, script.split(";")):
        point, action, *hit = part.split(":")
        if point not in _ALL:
            raise ValueError(f"{_ENV} names an unknown point {point!r}; known: {', '.join(_ALL)}")
        text = hit[0].replace("*", "1+") if hit else "1"
        clauses[point] = _Clause(action, int(text.removesuffix("+")), text.endswith("+"))
    return clauses


class _Script:
    def __init__(self) -> None:
        self._clauses = _parse(os.environ.get(_ENV, ""))
        self._log = os.environ.get(_ENV_LOG)
        self._passes = dict.fromkeys(_ALL, 0)
        self.peer_pid: int | None = None
        self.active = bool(self._clauses or self._log)

    def reach(self, point: str) -> None:
        self._passes[point] += 1
        if self._log is not None:
            _append(self._log, point)
        clause = self._clauses.get(point)
        if clause is None:
            return
        passes = self._passes[point]
        if passes == clause.hit or (clause.lasts and passes > clause.hit):
            self._act(point, clause.action)

    def _act(self, point: str, action: str) -> None:
        if action in ("kill-peer", "kill-both") and self.peer_pid is not None:
            os.kill(self.peer_pid, signal.SIGKILL)
        if action in ("kill-self", "kill-both"):
            os.kill(os.getpid(), signal.SIGKILL)
        if action.startswith("raise-"):
            code = getattr(errno, action.removeprefix("raise-"))
            raise OSError(code, f"{os.strerror(code)} (injected at {point})")
        if action.startswith("pause-"):
            _pause(action.removeprefix("pause-"))


def _append(path: str, point: str) -> None:
    with open(path, "a") as log:
        log.write(point + "\n")


def _pause(path: str) -> None:
    _append(path + ".reached", "")
    deadline = time.monotonic() + _PAUSE_LIMIT_S
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.002)


_script = _Script()


def reload() -> None:
    """Read the environment again. A forked test process so gets its own script and counts."""
    global _script
    _script = _Script()


def set_peer(pid: int | None) -> None:
    """Set the process that ``kill-peer`` kills."""
    _script.peer_pid = pid


def reach(point: str) -> None:
    """Pass a fault point. Does nothing unless a script is installed."""
    if _script.active:
        _script.reach(point)
