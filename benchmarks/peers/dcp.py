"""``torch.distributed.checkpoint``: syncs files (not folders), caches plans, keeps staging memory.

Each rank writes with as many threads as ours. Outside of a process group, the process becomes the
only rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.lab.saver import Training
from benchmarks.peers.folders import Pending
from checkfreq import CFConfig

#: By peer name: the kind of background save, and whether staging happens there too.
KINDS: dict[str, tuple[AsyncCheckpointerType | None, bool]] = {
    "dcp.save": (None, False),
    "dcp.async_save, thread": (AsyncCheckpointerType.THREAD, False),
    "dcp.async_save, process": (AsyncCheckpointerType.PROCESS, False),
    "dcp.async_save, thread, aside": (AsyncCheckpointerType.THREAD, True),
    "dcp.async_save, process, aside": (AsyncCheckpointerType.PROCESS, True),
}


class Dcp:
    """One of `KINDS`. If staged in a thread, the next weight update waits for the staging."""

    def __init__(self, training: Training, *, name: str) -> None:
        self._training = training
        self._kind, self._aside = KINDS[name]
        _join_alone()
        self._planner = DefaultSavePlanner(enable_plan_caching=True)
        # Separate: its thread must not interfere with collectives of the training thread.
        self._group = dist.new_group(backend="gloo")
        self._stager: DefaultStager | None = None

    def save(self, folder: Path) -> Pending | None:
        """The live tensors are staged or written."""
        common: dict[str, Any] = {
            "storage_writer": FileSystemWriter(
                folder, sync_files=True, thread_count=CFConfig().writer_threads
            ),
            "planner": self._planner,
            "process_group": self._group,
        }
        if self._kind is None:
            dcp.save(self._training.state(), **common)
            return None
        response: Any = dcp.async_save(
            self._training.state(),
            async_checkpointer_type=self._kind,
            async_stager=self._usable_stager(self._kind),
            **common,
        )
        staging = getattr(response, "staging_completion", None)
        upload = getattr(response, "upload_completion", response)
        return Pending(upload.result, None if staging is None else staging.result)

    def _usable_stager(self, kind: AsyncCheckpointerType) -> DefaultStager:
        """The same each time, but in torch 2.11, which closes it after one save."""
        if self._stager is None or not self._stager._state_dict_stager._deepcopy_dispatch:
            self.close()
            self._stager = _stager(kind, aside=self._aside)
        return self._stager

    def load(self, folder: Path) -> None:
        """Reads into the live tensors; then restores the rest of the optimizer's state."""
        state = self._training.state()
        dcp.load(state, checkpoint_id=folder, process_group=self._group)
        self._training.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """End the stager's thread and release its memory."""
        if self._stager is not None:
            self._stager.close()


def _stager(kind: AsyncCheckpointerType, *, aside: bool) -> DefaultStager:
    """Staging memory: pinned and overlapping on CUDA, shared with a process that writes."""
    has_device = torch.cuda.is_available()
    in_process = kind is AsyncCheckpointerType.PROCESS
    return DefaultStager(StagingOptions(has_device, in_process, aside, has_device))


def _join_alone() -> None:
    """Create the process group that DCP needs: with a single rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
