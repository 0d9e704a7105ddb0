"""Small real disks that can fill up, fail, turn read-only or become slow. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_BLKIO = Path("/sys/fs/cgroup/blkio")
DEADLINE_S = 240.0


class Disk:
    """An ext4 file system in an image file, mounted through a loop device of its own."""

    def __init__(self, device: str, mount_point: Path) -> None:
        self.device = device
        self.mount_point = mount_point

    @property
    def filler(self) -> Path:
        """The file that takes up the free space."""
        return self.mount_point / "filler"

    def fill(self) -> None:
        """Use every free block."""
        fd = os.open(self.filler, os.O_WRONLY | os.O_CREAT)
        try:
            for piece in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while True:
                        end = os.fstat(fd).st_size
                        os.posix_fallocate(fd, end, piece)
        finally:
            os.close(fd)

    def free(self) -> None:
        """Undo ``fill``."""
        self.filler.unlink()

    def remount(self, option: str) -> None:
        """Remount; ``option`` is ``ro`` or ``rw``."""
        call("mount", "-o", f"remount,{option}", str(self.mount_point))

    def break_down(self) -> None:
        """Make the kernel find an error in the file system, which becomes read-only for good."""
        Path(f"/sys/fs/ext4/{Path(self.device).name}/trigger_fs_error").write_text("1")


def call(*command: str) -> str:
    """Run a system command; OSError with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextlib.contextmanager
def small_disk(folder: Path, *, num_bytes: int = 64 << 20) -> Iterator[Disk]:
    """A mounted disk; skips the test where mounting is not possible."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a small ext4 needs root and mkfs.ext4")
    image, mount_point = folder / "disk.img", folder / "disk"
    mount_point.mkdir()
    image.touch()
    os.truncate(image, num_bytes)
    call("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    try:
        device = call("losetup", "--find", "--show", str(image))
    except OSError as error:
        pytest.skip(f"no loop device: {error}")
    try:
        call("mount", "-o", "errors=remount-ro", device, str(mount_point))
        try:
            yield Disk(device, mount_point)
        finally:
            call("umount", str(mount_point))
    finally:
        call("losetup", "--detach", device)


@contextlib.contextmanager
def failing_calls(
    pid: int, call_name: str, error: str, *, which: str = "1+", path: Path | None = None
) -> Iterator[None]:
    """Inside the block, make a process's system call ``call_name`` fail with ``error``, by strace.

    ``which`` selects the calls that fail, in the syntax of strace's ``when``; default: all.
    ``path``: those alone on this file.
    """
    if shutil.which("strace") is None:
        pytest.skip("making system calls fail needs strace")
    inject = f"inject={call_name}:error={error}:when={which}"
    command = ["strace", "-f", "-p", str(pid), "-o", "/dev/null"]
    command += [] if path is None else ["-P", str(path)]
    tracer = subprocess.Popen(
        [*command, "-e", f"trace={call_name}", "-e", inject], stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr is not None
    with tracer, tracer.stderr:
        said = tracer.stderr.readline()
        if "attached" not in said:
            tracer.kill()
            pytest.skip(f"strace cannot attach: {said.strip()}")
        try:
            yield
        finally:
            tracer.terminate()
            tracer.wait(DEADLINE_S)


@contextlib.contextmanager
def slowed(disk: Disk, pid: int, *, bytes_per_s: int) -> Iterator[None]:
    """Limit the rate at which a process writes to a disk, with cgroup v1's throttle."""
    group = _BLKIO / f"checkfreq-test-{os.getpid()}"
    number = os.stat(disk.device).st_rdev
    rule = f"{os.major(number)}:{os.minor(number)} {bytes_per_s}"
    try:
        group.mkdir()
        (group / "blkio.throttle.write_bps_device").write_text(rule)
    except OSError as error:
        pytest.skip(f"no cgroup v1 blkio throttle: {error}")
    try:
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            (_BLKIO / "cgroup.procs").write_text(str(pid))
        group.rmdir()
