"""Finds the file system that a directory is on, in the kernel's list of mounts. Reads only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system; ``device`` is its number as "major:minor"."""

    device: str
    mount_point: str
    fs_type: str
    source: str


def mount_of(path: Path, *, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """The mount that ``path`` is on, or would be if it existed; None if that is unknown."""
    try:
        place = _nearest_existing(path)
        number = os.stat(place).st_dev
        mounts = list(_mounts(mountinfo.read_text(errors="surrogateescape")))
    except (OSError, RuntimeError, ValueError):  # also a loop of links, or an invalid name
        return None
    return _mount_of(place, f"{os.major(number)}:{os.minor(number)}", mounts)


def _nearest_existing(path: Path) -> Path:
    path = path.resolve()
    return next((p for p in (path, *path.parents) if p.exists()), path)


def _mounts(text: str) -> Iterator[Mount]:
    """Parse lines `id parent major:minor root point options ... - type source ...` (proc(5))."""
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if dash and len(before) >= 6 and len(after) >= 2:
            yield Mount(before[2], _unescaped(before[4]), after[0], _unescaped(after[1]))


def _mount_of(place: Path, device: str, mounts: list[Mount]) -> Mount | None:
    """The mount with that device number; without one, the mount that ``place`` lies under.

    Files on btrfs have a device number that is not their mount's. Of several mounts, the innermost
    around ``place``; of several at one mount point, the latest, which hides the others.
    """
    around = [mount for mount in mounts if place.is_relative_to(mount.mount_point)]
    same = [mount for mount in mounts if mount.device == device]
    candidates = [mount for mount in around if mount in same] or same or around
    innermost = max((len(mount.mount_point) for mount in candidates), default=0)
    return next((m for m in reversed(candidates) if len(m.mount_point) == innermost), None)


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
