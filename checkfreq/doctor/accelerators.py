"""Kernel and driver, NVML, and what only torch can tell, asked of a process of its own.

A driver may hang, and a context takes memory on the device: neither concerns this process.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from checkfreq.doctor.findings import Finding, Status
from checkfreq.doctor.machine import version_of
from checkfreq.notices.command import Output, run_command
from checkfreq.snapshot.pin_failures import FACTS, Machine, advice
from checkfreq.types import Json, size_text

#: A machine of which no fact is special.
_ORDINARY = Machine("6.1")
_PIECE_BYTES = 1 << 30
#: Importing torch, and making a context, from a slow disk.
_PROBE_S = 120.0
_PINNED = "Copies from a device to pinned memory run beside training; step() waits for others."


def kernel_and_driver(machine: Machine | None = None) -> Iterator[Finding]:
    """Which, and what is publicly known of these about pinning memory."""
    here = machine or Machine.here()
    known = [
        fact
        for fact in FACTS
        if fact.holds(here, _PIECE_BYTES) and not fact.holds(_ORDINARY, _PIECE_BYTES)
    ]
    yield Finding(
        "kernel_and_driver",
        Status.NOTE if known else Status.GOOD,
        str(here),
        "Known of these: " + "; ".join(fact.text for fact in known) + "."
        if known
        else "Nothing is known of them that makes pinning memory fail.",
        " ".join(fact.source for fact in known),
        {"kernel": here.kernel, "driver": here.driver},
    )


def nvml(load: str = "pynvml") -> Iterator[Finding]:
    """What NVIDIA's management library sees."""
    means = "It tells how much memory of a device other processes use."
    if version_of("nvidia-ml-py") is None:
        mend = "pip install nvidia-ml-py, if there is an NVIDIA GPU."
        yield Finding("nvml", Status.NOTE, "nvidia-ml-py is not installed", means, mend)
        return
    library: Any = importlib.import_module(load)
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        mend = (
            "Nothing, unless there is an NVIDIA GPU: then its driver is missing in this container."
        )
        yield Finding("nvml", Status.NOTE, f"no answer: {error}", means, mend)
        return
    try:
        devices = list(_devices(library))
        driver = library.nvmlSystemGetDriverVersion()
    finally:
        library.nvmlShutdown()
    used = "; ".join(
        f"{one['name']}, {size_text(one['free_bytes'])} of {size_text(one['total_bytes'])} free"
        for one in devices
    )
    figures = {"driver": driver, "devices": devices}
    yield Finding(
        "nvml", Status.GOOD, f"driver {driver}: {used or 'no device'}", means, "", figures
    )


def _devices(library: Any) -> Iterator[Json]:
    for index in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(index)
        memory = library.nvmlDeviceGetMemoryInfo(handle)
        yield {
            "name": str(library.nvmlDeviceGetName(handle)),
            "free_bytes": int(memory.free),
            "total_bytes": int(memory.total),
        }


def pinning(num_bytes: int, *, timeout_s: float = _PROBE_S) -> Iterator[Finding]:
    """Devices as torch sees them, and whether memory can be pinned for them."""
    if version_of("torch") is None:
        found = "torch is not installed"
        yield Finding("pinned_memory", Status.UNKNOWN, found, _PINNED, "pip install torch.")
        return
    # With the path of this process: it may have found checkfreq where a new one would not look.
    program = (
        f"import sys; sys.path[:] = {sys.path!r}; from checkfreq.snapshot.probe import main; "
        f"main({num_bytes})"
    )
    done = run_command([sys.executable, "-c", program], timeout_s=timeout_s)
    told = _told(done)
    if told is None:
        yield Finding(
            "pinned_memory",
            Status.WARNING,
            f"a process that imports torch {_how(done)}",
            "A training would fail in the same way, or hang.",
            "Run python -c 'import torch; print(torch.accelerator.current_accelerator())'.",
            {"exit_status": done.code},
        )
        return
    if not told["devices"]:
        found = f"no accelerator that torch {told['torch']} can use"
        mend = "Nothing to do on a machine without one; otherwise install the torch for its driver."
        means = "Training runs on the CPU, and state in host memory is copied, not pinned."
        yield Finding("pinned_memory", Status.NOTE, found, means, mend, told)
        return
    yield from told_of(told)


def told_of(told: Json) -> Iterator[Finding]:
    """What a probe told of accelerators."""
    names = ", ".join(told["devices"])
    yield Finding(
        "devices", Status.GOOD, f"{names} ({told['kind']} {told['runtime']})",
        "The accelerators that torch can use here.", "", {"devices": told["devices"]},
    )  # fmt: skip
    size = size_text(told["num_bytes"])
    if told["problem"]:
        known = advice(told["code"], Machine.here(), num_bytes=told["num_bytes"])
        found = f"cannot pin {size}: {told['problem']}"
        yield Finding("pinned_memory", Status.WARNING, found, _PINNED, known, told)
        return
    rate = told["num_bytes"] / max(told["copy_s"], 1e-9)
    yield Finding(
        "pinned_memory",
        Status.GOOD,
        f"{size} in {told['pin_s']:.2f} s; copied from the device at {rate / 1e9:.1f} GB/s",
        f"{_PINNED} A snapshot is copied in about its size by this.",
        "",
        told,
    )


def _told(done: Output) -> Json:
    try:
        found = json.loads(done.out.splitlines()[-1]) if done.succeeded else None
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def _how(done: Output) -> str:
    """How it failed: the signal, or the last line that it wrote."""
    if done.code is None:
        return f"did not end ({done.error.partition(' ')[2] or done.error})"
    if done.code < 0:
        return f"was ended by {signal.Signals(-done.code).name}"
    last = done.error.splitlines()[-1:] or [f"ended with {done.code}"]
    return f"failed: {os.fsdecode(last[0])[:300]}"
