"""The processes that train together: one, or as many as a launcher starts.

``torchrun`` and ``python -m torch.distributed.launch`` tell a process its rank by environment
variables. With a single process nothing here communicates.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: Exit status of a run that was told to stop and has its checkpoint.
STOPPED = 75


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all that train; ``local_rank`` counts those of its machine."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def launched(cls) -> Ranks:
        """From the launcher's environment variables."""
        said = os.environ
        return cls(
            int(said.get("RANK", "0")),
            int(said.get("WORLD_SIZE", "1")),
            int(said.get("LOCAL_RANK", "0")),
        )

    @property
    def is_alone(self) -> bool:
        """Whether this process trains alone."""
        return self.world == 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and reports."""
        return self.rank == 0

    def device(self, wanted: str | None) -> torch.device:
        """``--device``, or CUDA if available; with several ranks each has its own."""
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
        if device.type == "cuda" and device.index is None and not self.is_alone:
            return torch.device("cuda", self.local_rank)
        return device

    def wrap(self, model: nn.Module) -> nn.Module:
        """``model`` with its gradients averaged over the ranks."""
        if self.is_alone:
            return model
        on_gpu = next(model.parameters()).is_cuda
        return DistributedDataParallel(
            model, device_ids=[torch.cuda.current_device()] if on_gpu else None
        )

    def summed(self, *values: float) -> list[float]:
        """Each value summed over the ranks; every rank calls it."""
        if self.is_alone:
            return list(values)
        on_gpu = dist.get_backend() == "nccl"
        total = torch.tensor(values, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def meet(self) -> None:
        """Return once every rank has called this."""
        if not self.is_alone:
            dist.barrier()

    def share_buffers(self, model: nn.Module) -> None:
        """Give every rank the first one's buffers, as DDP does before each training batch."""
        if not self.is_alone:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[Ranks]:
    """The process group for the duration of the block; ``args`` as they apply to this rank.

    Only the first rank reports, and every rank has its own device.
    """
    ranks = Ranks.launched()
    device = ranks.device(args.device)
    args.device = str(device)
    if ranks.is_alone:
        yield ranks
        return
    if not ranks.is_first:
        args.quiet, args.report, args.history = True, None, None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def stopping(marker: Path, ranks: Ranks) -> Iterator[None]:
    """Create ``marker`` if the block was told to stop; it is removed when a run begins.

    The exit status says so too, but not through torchrun, which treats every status but 0 as a
    failure, exits with 1 itself, and with ``--max-restarts`` restarts ranks that have stopped.
    Under it ranks therefore end with 0, and a job script checks for the marker.
    """
    if ranks.is_first:
        marker.unlink(missing_ok=True)
    try:
        yield
    except SystemExit as end:
        if end.code != STOPPED:
            raise
        if ranks.is_first:
            _leave(marker)
        if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
            raise SystemExit(0) from end
        raise


def _leave(marker: Path) -> None:
    """An empty file that survives a power cut."""
    for path, flags in ((marker, os.O_WRONLY | os.O_CREAT), (marker.parent, os.O_RDONLY)):
        opened = os.open(path, flags, 0o666)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
