"""File systems that can lose power: ext4 and xfs in image files, shut down without flushing.

FS_IOC_SHUTDOWN drops everything that has not reached the device, as a power cut does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.disks import DEADLINE_S, call

_FS_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2

#: Image size in bytes (sparse), the command that formats it, and mount options. The journal
#: is not to be written by a timer while the test counts on its not being written.
VOLUMES = {
    "ext4": (64 << 20, ["mkfs.ext4", "-q", "-F"], "loop,commit=300"),
    "xfs": (320 << 20, ["mkfs.xfs", "-q", "-f"], "loop"),
}


class Volume:
    """A file system in an image file that can lose power."""

    def __init__(self, kind: str, folder: Path) -> None:
        num_bytes, self._format, self._options = VOLUMES[kind]
        self._image = folder / f"{kind}.img"
        self._kind = kind
        self.mount_point = folder / kind
        self.mount_point.mkdir()
        self._mounted = False  # os.path.ismount says no of a volume that was shut down
        self._image.touch()
        os.truncate(self._image, num_bytes)

    def format(self) -> None:
        call(*self._format, str(self._image))

    def mount(self) -> None:
        image, target = str(self._image), str(self.mount_point)
        call("mount", "-t", self._kind, "-o", self._options, image, target)
        self._mounted = True

    def cut_power(self) -> None:
        fd = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _FS_IOC_SHUTDOWN, struct.pack("i", _NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self._mounted:
            try:
                call("umount", str(self.mount_point))
                self._mounted = False
            except OSError as error:  # a process that was killed is not gone yet
                if "busy" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)


@contextlib.contextmanager
def mounted(kind: str, folder: Path) -> Iterator[Volume]:
    """A fresh volume; skips the test where mounting is not possible."""
    program = VOLUMES[kind][1][0]
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian: e2fsprogs, xfsprogs)")
    volume = Volume(kind, folder)
    volume.format()
    try:
        volume.mount()
    except OSError as error:
        pytest.skip(f"this machine cannot mount a {kind} image: {error}")
    try:
        yield volume
    finally:
        volume.unmount()
