"""Which engine takes the snapshots of a state: decided by where its tensors are."""

from __future__ import annotations

import torch

from checkfreq.errors import StateError
from checkfreq.snapshot.arena import Pinner
from checkfreq.snapshot.device import CudaDevice
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import HostEngine, SnapshotEngine
from checkfreq.state.capture import read_everything
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import SnapshotPlace


def engine_for(
    chk: CFCheckpoint,
    *,
    pinner: Pinner | None = None,
    place: SnapshotPlace | None = None,
) -> SnapshotEngine:
    """The engine for what ``chk`` tracks, as it is now; training thread.

    ``pinner`` page-locks slots that are not pinned yet. Raises StateError for tensors on a
    device that no engine can order.
    """
    if not torch.accelerator.is_available():
        return HostEngine()
    everything = read_everything(chk, positions={}, barrier_on_device=True)
    found = {ref.tensor.device.type for ref in everything.refs}
    unknown = found - {"cpu", "cuda"}
    if unknown:
        raise StateError(
            f"tracked tensors are on {', '.join(sorted(unknown))}; snapshots can be ordered on "
            "cpu and cuda only. Move them there"
        )
    if "cuda" in found:
        return DeviceEngine(CudaDevice(), pinner=pinner, place=place or SnapshotPlace.HOST)
    return HostEngine()
