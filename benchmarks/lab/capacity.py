"""Whether this machine has enough memory and disk to checkpoint a state."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from checkfreq.snapshot.memory import available_host_bytes

_GIB = 2**30
_SPARE_BYTES = _GIB
#: Two slots, each with slack for state that grows.
SLOTS = 2.1
_ON_DISK = 2.1  # a checkpoint is kept until the next one is committed


def shortage(
    num_bytes: int,
    device: torch.device,
    folder: Path,
    *,
    copies: float = SLOTS,
    on_device: float = 1.0,
    on_disk: float = _ON_DISK,
) -> str | None:
    """Why a state of ``num_bytes`` cannot be measured here; None if it can.

    Required are ``copies`` of it in host memory besides the training's own, ``on_device`` in the
    GPU's, the training's included, and ``on_disk``.
    """
    on_host = copies if device.type == "cuda" else 1 + copies
    host_bytes = available_host_bytes()
    if host_bytes is not None and host_bytes < on_host * num_bytes + _SPARE_BYTES:
        return _too_little("memory", on_host * num_bytes, host_bytes)
    if device.type == "cuda":
        device_bytes = torch.cuda.mem_get_info(device)[0]
        if device_bytes < on_device * num_bytes + _SPARE_BYTES:
            return _too_little("memory of the GPU", on_device * num_bytes, device_bytes)
    disk_bytes = shutil.disk_usage(folder).free
    if disk_bytes < on_disk * num_bytes + _SPARE_BYTES:
        return _too_little("disk", on_disk * num_bytes, disk_bytes)
    return None


def _too_little(what: str, needed: float, free: int) -> str:
    return (
        f"needs {(needed + _SPARE_BYTES) / _GIB:.1f} GiB of {what}, "
        f"and {free / _GIB:.1f} GiB are free"
    )
