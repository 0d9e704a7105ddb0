"""What is said of memory that cannot be pinned: versions, and what is known for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.snapshot.pin_failures import Machine, advice

GIB = 1 << 30
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC\n"
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


MACHINES = {
    "closed": ("proc/driver/nvidia/version", CLOSED, "NVIDIA 535.129.03"),
    "open": ("proc/driver/nvidia/version", OPEN, "NVIDIA 580.65.06"),
    "nothing known": ("proc/driver/nvidia/version", "nothing known", "unknown"),
    "AMD's of the kernel": ("sys/module/amdgpu/refcnt", "1", "amdgpu of the kernel"),
    "AMD's own": ("sys/module/amdgpu/version", "6.7.0\n", "amdgpu 6.7.0"),
}


@pytest.mark.parametrize(("path", "text", "driver"), MACHINES.values(), ids=MACHINES.keys())
def test_kernel_and_driver_are_named_with_their_versions(
    tmp_path: Path, path: str, text: str, driver: str
) -> None:
    for name, content in (("proc/sys/kernel/osrelease", "6.8.0-45-generic\n"), (path, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    found = Machine.here(proc=tmp_path / "proc", sys=tmp_path / "sys")
    assert str(found) == f"Linux 6.8.0-45-generic, driver {driver}"


WSL = Machine("5.15.167.4-microsoft-standard-WSL2")
OLD = Machine("5.15.0-100-generic", "NVIDIA 535.129.03")
NEW = Machine("6.11.0-1008-nvidia", "NVIDIA 580.65.06")
KEXEC = Machine("7.0.0-1019-nvidia", "NVIDIA 595.84")
AMD = Machine("6.8.0-45-generic", "amdgpu 6.7.0")


WSL_ISSUE, MIXED, LARGE = "WSL/issues/14078", "NV-Kernels/pull/108", "94efde1d15399f5c88e576923db9"
HUGE, KEXECED, ROCM = "modules/pull/1234", "NV-Kernels/pull/591", "legacy-rocm-build/issues/708"
CGROUP, DOCUMENTED, UNKNOWN = "cgroup-v2.html", "group__CUDART__MEMORY.html", "dmesg"


@pytest.mark.parametrize(
    ("code", "where", "num_bytes", "said"),
    [
        (2, WSL, GIB, {WSL_ISSUE}),
        (2, OLD, 600 * GIB, {CGROUP}),
        (2, NEW, GIB, {MIXED}),
        (2, NEW, 511 * GIB, {MIXED, LARGE}),
        (2, NEW, 512 * GIB, {MIXED, LARGE, HUGE}),
        (2, Machine("6.14.0"), 2 * GIB, set()),
        (2, Machine("unversioned"), 2 * GIB, set()),
        (2, KEXEC, GIB, {KEXECED}),
        (2, AMD, GIB, {ROCM}),
        (800, OLD, GIB, {DOCUMENTED}),
        (801, NEW, GIB, {DOCUMENTED}),
        (999, NEW, GIB, {UNKNOWN}),
    ],
)
def test_what_is_known_here_is_said_with_its_source(
    code: int, where: Machine, num_bytes: int, said: set[str]
) -> None:
    text = advice(code, where, num_bytes=num_bytes)
    known = {WSL_ISSUE, MIXED, LARGE, HUGE, KEXECED, ROCM, CGROUP, DOCUMENTED, UNKNOWN}
    found = {source for source in known if source in text}
    assert said <= found <= said | {CGROUP}
