"""What is said of memory that cannot be pinned: versions, and what is known for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.snapshot.pin_failures import FACTS, Machine, advice

GIB = 1 << 30
CLOSED = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
ONE_LINE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\n"
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""


def machine(root: Path, *, kernel: str = "6.8.0-45-generic\n", **files: str) -> Machine:
    """What a machine with these files says; ``a__b`` is the path ``a/b``."""
    for name, text in {"proc__sys__kernel__osrelease": kernel, **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Machine.here(proc=root / "proc", sys=root / "sys")


@pytest.mark.parametrize(
    ("text", "driver", "branch"),
    [(CLOSED, "535.129.03", 535), (ONE_LINE, "550.54.15", 550), (OPEN, "580.65.06", 580)],
)
def test_nvidias_driver_is_named_with_its_version(
    tmp_path: Path, text: str, driver: str, branch: int
) -> None:
    found = machine(tmp_path, proc__driver__nvidia__version=text)
    assert str(found) == f"Linux 6.8.0-45-generic, driver NVIDIA {driver}"
    assert found.nvidia_branch == branch
    assert found.kernel_version == (6, 8)
    assert not found.is_wsl
    assert not found.is_amd


def test_amds_driver_is_named_with_its_version_if_it_has_one(tmp_path: Path) -> None:
    inside = machine(tmp_path / "a", sys__module__amdgpu__refcnt="1")
    assert str(inside).endswith("driver amdgpu of the kernel")
    outside = machine(tmp_path / "b", sys__module__amdgpu__version="6.7.0\n")
    assert str(outside).endswith("driver amdgpu 6.7.0")
    assert inside.is_amd
    assert outside.is_amd
    assert outside.nvidia_branch == 0


def test_without_a_driver_or_a_proc_there_is_still_an_answer(tmp_path: Path) -> None:
    assert machine(tmp_path, proc__driver__nvidia__version="nothing known").driver == ""
    nowhere = Machine.here(proc=tmp_path / "no", sys=tmp_path / "no")
    assert nowhere.kernel
    assert "driver unknown" in str(nowhere)
    assert Machine("unversioned").kernel_version == ()
    assert str(Machine.here()), "of the machine that runs this"


WSL = Machine("5.15.167.4-microsoft-standard-WSL2")
OLD = Machine("5.15.0-100-generic", "NVIDIA 535.129.03")
NEW = Machine("6.11.0-1008-nvidia", "NVIDIA 580.65.06")
KEXEC = Machine("7.0.0-1019-nvidia", "NVIDIA 595.84")
AMD = Machine("6.8.0-45-generic", "amdgpu 6.7.0")


WSL_ISSUE, MIXED, LARGE = "WSL/issues/14078", "NV-Kernels/pull/108", "94efde1d15399f5c88e576923db9"
HUGE, KEXECED, ROCM = "modules/pull/1234", "NV-Kernels/pull/591", "legacy-rocm-build/issues/708"
CGROUP, DOCUMENTED = "cgroup-v2.html", "group__CUDART__MEMORY.html"


@pytest.mark.parametrize(
    ("code", "where", "num_bytes", "said"),
    [
        (2, WSL, GIB, {WSL_ISSUE}),
        (2, OLD, GIB, {CGROUP}),
        (2, OLD, 600 * GIB, {CGROUP}),
        (2, NEW, GIB, {MIXED}),
        (2, NEW, 2 * GIB, {MIXED, LARGE}),
        (2, NEW, 511 * GIB, {MIXED, LARGE}),
        (2, NEW, 512 * GIB, {MIXED, LARGE, HUGE}),
        (2, Machine("6.14.0"), 2 * GIB, set()),
        (2, KEXEC, GIB, {KEXECED}),
        (2, AMD, GIB, {ROCM}),
        (800, OLD, GIB, {DOCUMENTED}),
        (801, NEW, GIB, {DOCUMENTED}),
    ],
)
def test_what_is_known_here_is_said_with_its_source(
    code: int, where: Machine, num_bytes: int, said: set[str]
) -> None:
    text = advice(code, where, num_bytes=num_bytes)
    known = {WSL_ISSUE, MIXED, LARGE, HUGE, KEXECED, ROCM, CGROUP, DOCUMENTED}
    assert {source for source in known if source in text} >= said
    assert {source for source in known - {CGROUP} if source in text} <= said


@pytest.mark.parametrize("code", [None, 999])
def test_where_nothing_is_known_the_kernels_log_is_named(code: int | None) -> None:
    assert "dmesg" in advice(code, NEW, num_bytes=GIB)


def test_every_fact_has_a_source_and_none_blames_the_limit_on_locked_memory() -> None:
    for fact in FACTS:
        assert fact.source.startswith("https://")
        assert "ulimit" not in fact.text
        assert not fact.text.endswith(".")
