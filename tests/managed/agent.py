"""The agent of managed spot training, by the rules that its users are told.

It copies every file of a local directory to objects, one by one, while they are written, in any
order and at any instant, and removes the objects of files that are gone. An object is a name and
bytes: no folders, links, times or permissions, and no rename. While it copies a file it leaves a
marker beside it, as SageMaker's does. If the machine is lost an object may be there in part. A new
machine gets every object, in any order, in an empty directory before its program starts.

The seed decides order, pieces and pauses.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from tests.fork_server import FORK_SERVER

COPYING, COPIED = ".sagemaker-uploading", ".sagemaker-uploaded"
#: Of the content of a file: what of it is changed under an unchanged stamp is copied later.
Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Settings:
    """``pause_s`` is the longest time between two pieces; ``uploads_markers``: they arrive too."""

    local: Path
    objects: Path
    seed: int
    pause_s: float = 0.0
    uploads_markers: bool = True


class Agent:
    """The agent in a process of its own; SIGKILLed when the ``with`` block is left."""

    def __init__(self, settings: Settings) -> None:
        self.num_done = 0
        known = dict(_stamps(settings))  # what it brought
        self._pipe, theirs = FORK_SERVER.Pipe(duplex=False)
        self._process: Any = FORK_SERVER.Process(
            target=copy_for_good, args=(settings, known, theirs)
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def count(self) -> int:
        """How many files it has copied or removed by now."""
        while self._pipe.poll():
            self._pipe.recv()
            self.num_done += 1
        return self.num_done

    def kill(self) -> None:
        """End it wherever it is."""
        self._process.kill()
        self._process.join()


def copy_for_good(settings: Settings, known: dict[str, Stamp], done: Connection) -> None:
    """Entry point of the process; ``known``: what the objects hold already."""
    dice = random.Random(settings.seed)
    while True:
        there = dict(_stamps(settings))
        changed = sorted(name for name in {*there, *known} if there.get(name) != known.get(name))
        if not changed:
            time.sleep(0.001)
        for name in dice.sample(changed, k=dice.randint(0, min(4, len(changed)))):
            if name in there:
                _copy(settings, name, dice)
                known[name] = there[name]
            else:
                (settings.objects / quote(name, safe="")).unlink(missing_ok=True)
                del known[name]
            done.send(None)


def copy_whole(local: Path, objects: Path) -> Path:
    """The objects of a directory in which nothing changes; returns their folder."""
    objects.mkdir()
    for path in local.rglob("*"):
        if path.is_file():
            name = quote(str(path.relative_to(local)), safe="")
            (objects / name).write_bytes(path.read_bytes())
    return objects


def bring_back(objects: Path, local: Path, *, seed: int) -> None:
    """What the agent of a new machine does before the program starts."""
    local.mkdir(parents=True)
    found = sorted(objects.iterdir())
    random.Random(seed).shuffle(found)
    for item in found:
        path = local / unquote(item.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.read_bytes())


def _stamps(settings: Settings) -> Iterator[tuple[str, Stamp]]:
    for folder, _, names in os.walk(settings.local):
        for name in names:
            path = Path(folder, name)
            if name.endswith((COPYING, COPIED)) and not settings.uploads_markers:
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
                yield str(path.relative_to(settings.local)), stamp


def _copy(settings: Settings, name: str, dice: random.Random) -> None:
    """Piece by piece: what is read later may have been written since."""
    path = settings.local / name
    marker = path.with_name(path.name + COPYING)
    try:
        with open(path, "rb") as source:
            _mark(marker, name)
            with open(settings.objects / quote(name, safe=""), "wb", buffering=0) as target:
                while piece := source.read(dice.choice((512, 4096, 65536))):
                    target.write(piece)
                    time.sleep(dice.uniform(0.0, settings.pause_s))
    except FileNotFoundError:  # renamed or removed since it was seen
        return
    with contextlib.suppress(FileNotFoundError):
        marker.rename(path.with_name(path.name + COPIED))


def _mark(marker: Path, name: str) -> None:
    if not name.endswith((COPYING, COPIED)):
        with contextlib.suppress(FileNotFoundError):
            marker.touch()
