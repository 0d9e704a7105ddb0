"""What is publicly known about memory that cannot be pinned, by error, kernel and driver.

Reads what the kernel says of itself and of its drivers, and initialises none. A fact has a source
that anybody can read.

The limit on locked memory (``ulimit -l``) is no cause: NVIDIA's driver pins by ``pin_user_pages``
and accounts for nothing (``os_lock_user_pages`` in kernel-open/nvidia/os-mlock.c of
https://github.com/NVIDIA/open-gpu-kernel-modules), and https://github.com/microsoft/WSL/issues/14078
fails with that limit off.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SYS = Path("/sys")
_NO_MEMORY, _NOT_PERMITTED, _NOT_SUPPORTED = 2, 800, 801


@dataclass(frozen=True, slots=True)
class Machine:
    """A kernel and an accelerator's driver; ``driver`` is "" where it does not say."""

    kernel: str
    driver: str = ""

    @classmethod
    def here(cls, *, proc: Path = _PROC, sys: Path = _SYS) -> Machine:
        """What this process runs on."""
        release = _text(proc / "sys/kernel/osrelease").strip() or platform.release()
        return cls(release, _nvidia(proc) or _amd(sys))

    @property
    def kernel_version(self) -> tuple[int, ...]:
        """Major and minor; empty if the release does not begin with them."""
        found = re.match(r"(\d+)\.(\d+)", self.kernel)
        return tuple(map(int, found.groups())) if found else ()

    @property
    def nvidia_branch(self) -> int:
        """580 of NVIDIA 580.65.06; 0 for other drivers."""
        found = re.match(r"NVIDIA (\d+)", self.driver)
        return int(found[1]) if found else 0

    @property
    def is_wsl(self) -> bool:
        """Whether this is the Windows Subsystem for Linux."""
        return "microsoft" in self.kernel.lower()

    @property
    def is_amd(self) -> bool:
        """Whether the driver is AMD's."""
        return self.driver.startswith("amdgpu")

    def __str__(self) -> str:
        return f"Linux {self.kernel}, driver {self.driver or 'unknown'}"


@dataclass(frozen=True, slots=True)
class Fact:
    """A known cause of some error codes on some machines, for calls of some size in bytes."""

    codes: tuple[int, ...]
    holds: Callable[[Machine, int], bool]
    text: str
    source: str


FACTS = (
    Fact(
        (_NO_MEMORY,),
        lambda machine, _: machine.is_wsl,
        "WSL leaves little memory to pin, and Docker on it less",
        "https://github.com/microsoft/WSL/issues/14078",
    ),
    Fact(
        (_NO_MEMORY,),
        lambda machine, _: (6, 11) <= machine.kernel_version <= (6, 13),
        "Linux 6.11 to 6.13, unless patched, leaks memory on long-term pins and fails: update it",
        "https://github.com/NVIDIA/NV-Kernels/pull/108",
    ),
    Fact(
        (_NO_MEMORY,),
        lambda machine, size: size >= 2 << 30 and (6, 11) <= machine.kernel_version <= (6, 13),
        "Linux 6.11 to 6.13, unless patched, pins less than 2 GiB per call",
        "https://git.kernel.org/torvalds/c/94efde1d15399f5c88e576923db9bcd422d217f2",
    ),
    Fact(
        (_NO_MEMORY,),
        lambda machine, size: size >= 512 << 30 and machine.nvidia_branch >= 580,
        "NVIDIA's driver from 580 on pins less than 512 GiB per call",
        "https://github.com/NVIDIA/open-gpu-kernel-modules/pull/1234",
    ),
    Fact(
        (_NO_MEMORY,),
        lambda machine, _: machine.kernel_version >= (7, 0),
        "Linux 7 may reserve memory for kexec handover that cannot be pinned: boot with kho=off",
        "https://github.com/NVIDIA/NV-Kernels/pull/591",
    ),
    Fact(
        (_NO_MEMORY,),
        lambda machine, _: machine.is_amd,
        "amdgpu limits the host memory that GPUs may use to a part of it",
        "https://github.com/ROCm/legacy-rocm-build/issues/708",
    ),
    Fact(
        (_NO_MEMORY,),
        lambda machine, _: True,
        "Pinned pages count against a container's memory limit, and cannot be swapped out: give it "
        "more memory, or lower CFConfig.num_slots",
        "https://docs.kernel.org/admin-guide/cgroup-v2.html#memory",
    ),
    Fact(
        (_NOT_PERMITTED, _NOT_SUPPORTED),
        lambda machine, _: True,
        "The device or its driver does not pin memory that it did not allocate "
        "(cudaDevAttrHostRegisterSupported)",
        "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html",
    ),
)


def advice(code: int | None, machine: Machine, *, num_bytes: int) -> str:
    """What is known about an error code of a call that was to pin ``num_bytes``; one sentence each.

    ``code`` is None where the driver returned none.
    """
    known = [
        f"{fact.text} ({fact.source})"
        for fact in FACTS
        if code in fact.codes and fact.holds(machine, num_bytes)
    ]
    return ". ".join(known) or "No cause is known; the kernel's log (dmesg) may name it"


def _nvidia(proc: Path) -> str:
    """From a line like `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu ...`."""
    text = _text(proc / "driver/nvidia/version")
    found = re.search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", text, re.MULTILINE)
    return f"NVIDIA {found[1]}" if found else ""


def _amd(sys: Path) -> str:
    """AMD's driver has a version of its own only where it is not the kernel's."""
    version = _text(sys / "module/amdgpu/version").strip()
    if version:
        return f"amdgpu {version}"
    return "amdgpu of the kernel" if (sys / "module/amdgpu").is_dir() else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
