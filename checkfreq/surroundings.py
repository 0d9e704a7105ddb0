"""What measured costs depend on besides the training itself: machine, storage, versions.

Part of the key of a cached profile, so everything here is stable between runs on the same
machine, and nothing here fails: what cannot be told is "unknown".
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkfreq import __version__
from checkfreq.snapshot.device import devices_in_use

UNKNOWN = "unknown"
_CPUINFO = Path("/proc/cpuinfo")
_MOUNTINFO = Path("/proc/self/mountinfo")


def surroundings(chk_dir: Path) -> dict[str, Any]:
    """JSON-able facts about what this process runs on and writes to.

    Accelerators count once they are in use: to be called after the first weight update.
    """
    return {
        "devices": [torch.cuda.get_device_name(index) for index in devices_in_use()],
        "cpu": cpu_model(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "storage": storage_of(chk_dir),
        "checkfreq": __version__,
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "cuda": torch.version.cuda or torch.version.hip,
    }


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """The model name of the first processor, or at least its architecture."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(\S.*?)\s*$", text, re.MULTILINE)
    return found[1] if found else platform.machine() or UNKNOWN


def num_cores() -> int:
    """Processors that the scheduler may put this process on."""
    return len(os.sched_getaffinity(0))


# ---- storage


@dataclass(frozen=True, slots=True)
class _Mount:
    device: str
    mount_point: str
    fs_type: str
    source: str


def storage_of(path: Path, *, mountinfo: Path = _MOUNTINFO) -> str:
    """File system type, source and device number of what holds ``path`` (or will hold it).

    Number 0 stands for a file system without a block device: the rest is given out anew at
    each mount.
    """
    try:
        place = _nearest_existing(path)
        number = os.stat(place).st_dev
        mounts = list(_mounts(mountinfo.read_text(errors="surrogateescape")))
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that cannot be
        return UNKNOWN
    mount = _mount_of(place, f"{os.major(number)}:{os.minor(number)}", mounts)
    if mount is None:
        return UNKNOWN
    device = "0" if mount.device.startswith("0:") else mount.device
    return f"{mount.fs_type} {_printable(mount.source)} {device}"


def _nearest_existing(path: Path) -> Path:
    path = path.resolve()
    return next((p for p in (path, *path.parents) if p.exists()), path)


def _mounts(text: str) -> Iterator[_Mount]:
    """The lines `id parent major:minor root point options ... - type source ...` (proc(5))."""
    for line in text.splitlines():
        left, dash, right = line.partition(" - ")
        before, after = left.split(), right.split()
        if dash and len(before) >= 6 and len(after) >= 2:
            yield _Mount(before[2], _unescaped(before[4]), after[0], _unescaped(after[1]))


def _mount_of(place: Path, device: str, mounts: list[_Mount]) -> _Mount | None:
    """The mount with that device number; else (btrfs has others) the one it lies under.

    Of several the innermost around ``place``, and of those the latest, which hides the others.
    """
    around = [mount for mount in mounts if place.is_relative_to(mount.mount_point)]
    same = [mount for mount in mounts if mount.device == device]
    candidates = [mount for mount in around if mount in same] or same or around
    innermost = max((len(mount.mount_point) for mount in candidates), default=0)
    return next((m for m in reversed(candidates) if len(m.mount_point) == innermost), None)


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
