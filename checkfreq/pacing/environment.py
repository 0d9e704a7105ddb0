"""The environment that measured costs depend on: machine, storage, versions.

It is part of the key of a cached profile, so every value is stable between runs on the same
machine. Nothing here fails: a value that cannot be determined is "unknown".
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from checkfreq import __version__
from checkfreq.snapshot.backends import BACKENDS
from checkfreq.store.mounts import MOUNTINFO, mount_of

UNKNOWN = "unknown"
_CPUINFO = Path("/proc/cpuinfo")


def environment(chk_dir: Path) -> dict[str, Any]:
    """The machine that this process runs on and the storage it writes to, as JSON-able values.

    Only accelerators in use are listed: call it after the first weight update.
    """
    return {
        "devices": [name for device in BACKENDS.values() for name in device.names()],
        "cpu": cpu_model(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "storage": storage_of(chk_dir),
        "checkfreq": __version__,
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{kind: device.runtime_version() for kind, device in BACKENDS.items()},
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


def storage_of(path: Path, *, mountinfo: Path = MOUNTINFO) -> str:
    """Type, source and device number of the file system that holds ``path``, or will hold it.

    A file system without a block device gets number 0, since its own changes at each mount.
    """
    mount = mount_of(path, mountinfo=mountinfo)
    if mount is None:
        return UNKNOWN
    device = "0" if mount.device.startswith("0:") else mount.device
    return f"{mount.fs_type} {_printable(mount.source)} {device}"


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
