"""Memory, shared memory, processors, limits, versions: what the kernel and Python tell."""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import platform
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

import checkfreq
from checkfreq.doctor.findings import Finding, Status
from checkfreq.snapshot.memory import available_host_bytes, cgroup_limit_bytes
from checkfreq.types import size_text

_SHM = Path("/dev/shm")
_SMALL_SHM = 1 << 30
_PACKAGES = ("torch", "numpy", "xxhash", "click", "nvidia-ml-py", "obstore", "rich", "matplotlib",
             "safetensors", "transformers", "accelerate", "lightning", "torchdata",
             "nvidia-dali-cuda120")  # fmt: skip
#: What checkfreq needs at least.
_PYTHON, _TORCH = (3, 10), (2, 11)
#: Variables that change what a run does, and hold no secrets. No others are shown.
_VARIABLES = ("CHECKFREQ_FAULT", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS",
              "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTHONMALLOC", "MALLOC_ARENA_MAX",
              "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NCCL_DEBUG", "WORLD_SIZE",
              "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS")  # fmt: skip


def memory() -> Iterator[Finding]:
    """What this process may still use, and the limit of its container."""
    available, limit = available_host_bytes(), cgroup_limit_bytes()
    known = "not told" if available is None else f"{size_text(available)} available"
    yield Finding(
        "host_memory",
        Status.NOTE if available is None else Status.GOOD,
        known,
        "Two copies of the state are kept in host memory, once for the run; where there is less "
        "room, one.",
        figures={"available_bytes": available},
    )
    if limit is None:
        yield Finding("cgroup_limit", Status.GOOD, "none", "No container limits the memory.")
    else:
        yield Finding(
            "cgroup_limit",
            Status.NOTE,
            size_text(limit),
            "The container's limit on memory. Slots and the page cache count; at the limit the "
            "kernel kills the trainer or a loader's worker.",
            "Ask for the training's own memory and twice the state on top (docker --memory, "
            "resources.limits.memory, sbatch --mem), or set CFConfig(num_slots=1).",
            {"limit_bytes": limit},
        )


def shared_memory(shm: Path = _SHM) -> Iterator[Finding]:
    """Slots are memfds; workers of a DataLoader use /dev/shm."""
    try:
        fd = os.memfd_create("checkfreq-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, 1 << 20)
            with mmap.mmap(fd, 1 << 20) as memory_:
                memory_[-1:] = b"x"
        finally:
            os.close(fd)
        yield Finding(
            "memfd", Status.GOOD, "works", "Snapshots are taken into memory of this kind."
        )
    except OSError as error:
        yield Finding(
            "memfd",
            Status.PROBLEM,
            f"refused: {error.strerror}",
            "Snapshots are taken into memory of this kind: no checkpoint is possible.",
            "The sandbox forbids memfd_create: allow it in its seccomp profile.",
        )
    try:
        status = os.statvfs(shm)
    except OSError as error:
        yield Finding("dev_shm", Status.WARNING, f"{shm}: {error.strerror}", _SHM_MEANS, _SHM_MEND)
        return
    size = status.f_blocks * status.f_frsize
    yield Finding(
        "dev_shm",
        Status.WARNING if size < _SMALL_SHM else Status.GOOD,
        f"{size_text(size)}, of which {size_text(status.f_bavail * status.f_frsize)} are free",
        _SHM_MEANS,
        _SHM_MEND if size < _SMALL_SHM else "",
        {"total_bytes": size, "free_bytes": status.f_bavail * status.f_frsize},
    )


_SHM_MEANS = (
    "Workers of a DataLoader pass batches through it, and die with a bus error if it is full. "
    "checkfreq does not use it."
)
_SHM_MEND = "docker run --shm-size=8g, or --ipc=host; Kubernetes: an emptyDir of medium Memory."


def processors(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> Iterator[Finding]:
    """How many may be used."""
    cores = len(os.sched_getaffinity(0))
    quota = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        amount, period = cpu_max.read_text().split()[:2]
        quota = None if amount == "max" else int(amount) / int(period)
    usable = cores if quota is None else min(cores, quota)
    is_short = usable < 2 or (quota is not None and quota < cores / 2)
    of = "" if quota is None else f", {quota:g} at a time by the container's quota"
    yield Finding(
        "processors",
        Status.NOTE if is_short else Status.GOOD,
        f"{cores}{of}",
        "The worker writes and digests beside training, on processors that training leaves free.",
        "With fewer than the threads think, all are stopped at once: lower OMP_NUM_THREADS and the "
        "loader's num_workers, or ask for more."
        if is_short
        else "",
        {"cores": cores, "quota": quota},
    )


def limits() -> Iterator[Finding]:
    """Limits of the process that checkpoints meet."""
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most == resource.RLIM_INFINITY:
        yield Finding("file_size_limit", Status.GOOD, "none", "Files may have any size.")
    else:
        yield Finding(
            "file_size_limit",
            Status.WARNING,
            size_text(most),
            "No file may be larger (ulimit -f), not even that of a large model.",
            "ulimit -f unlimited, or LimitFSIZE of the service.",
            {"limit_bytes": most},
        )
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = files != resource.RLIM_INFINITY and files < 1024
    yield Finding(
        "open_files_limit",
        Status.WARNING if is_low else Status.GOOD,
        str(files),
        "Loader workers pass a descriptor with each tensor; checkfreq itself needs a few dozen.",
        "ulimit -n 65536." if is_low else "",
        {"limit": files},
    )
    yield _pidfd()


def _pidfd() -> Finding:
    means = "The worker sees the trainer's death by it, and keeps its memory for the next run."
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "pidfd",
            Status.WARNING,
            f"refused: {error.strerror}",
            means,
            "Linux 5.3 or newer has it; a sandbox must allow pidfd_open.",
        )
    return Finding("pidfd", Status.GOOD, "works", means)


def versions() -> Iterator[Finding]:
    """Of everything that is involved."""
    found = {name: version for name in _PACKAGES if (version := version_of(name)) is not None}
    python = platform.python_version()
    old = [] if _numbers(python) >= _PYTHON else [f"Python {python}"]
    if "torch" in found and _numbers(found["torch"]) < _TORCH:
        old.append(f"torch {found['torch']}")
    shown = {"checkfreq": checkfreq.__version__, "Python": python, **found}
    yield Finding(
        "versions",
        Status.PROBLEM if old else Status.GOOD,
        ", ".join(f"{name} {version}" for name, version in shown.items()),
        "checkfreq needs Python 3.10 and torch 2.11, or newer."
        + ("" if "torch" in found else " torch is not installed: only what needs none works here."),
        f"Too old: {', '.join(old)}. Install newer ones." if old else "",
        shown,
    )
    libc = " ".join(platform.libc_ver())
    yield Finding(
        "system",
        Status.GOOD if platform.system() == "Linux" else Status.PROBLEM,
        f"{platform.system()} {platform.release()}, {platform.machine()}, {libc or 'no glibc'}",
        "checkfreq runs on Linux.",
        figures={"kernel": platform.release(), "machine": platform.machine(), "libc": libc},
    )


def environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The variables that matter."""
    found = {name: environ[name][:120] for name in _VARIABLES if name in environ}
    has_fault = "CHECKFREQ_FAULT" in found
    yield Finding(
        "environment",
        Status.WARNING if has_fault else Status.GOOD,
        ", ".join(f"{name}={value}" for name, value in found.items()) or "nothing that matters",
        "Variables that change what a run does."
        + (" CHECKFREQ_FAULT makes checkpoints fail, for tests." if has_fault else ""),
        "unset CHECKFREQ_FAULT." if has_fault else "",
        found,
    )


def version_of(package: str) -> str | None:
    """The version of an installed package, which is not imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)
