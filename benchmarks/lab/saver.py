"""What a way to checkpoint offers so that benchmarks can compare it with others.

A `Saver` stands in a training loop at two places, where it may hold the training thread: the
boundary between two iterations (where it saves if asked to) and the entry of the weight update.
It keeps the newest checkpoint alone, and brings it back into the live training.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Training:
    """What is saved: a model and its optimizer, which both stay the same objects."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        """Their state dicts, as ``model`` and ``optimizer``; the tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` gave."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds until a save was on disk: from its call; from the complete snapshot, if known.

    ``removal_s``: of `Saver.finish`, for the removal of the checkpoint before.
    """

    durable_s: float
    persist_s: float | None = None
    removal_s: float = 0.0


class Saver(Protocol):
    """One way to checkpoint, in the place where a training loop has it."""

    def boundary(self, *, save: bool) -> None:
        """Between two iterations; training stands still as long as it takes."""
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Around the weight update; training stands still as long as it takes to enter."""
        ...

    def is_durable(self) -> bool:
        """Whether, as far as this rank can say, the last save is on disk, or has failed.

        Where files are not synced: whether they were written.
        """
        ...

    def is_quiet(self) -> bool:
        """Whether, besides, nothing goes on in the background, such as a removal."""
        ...

    def finish(self) -> Saved:
        """Wait for the last save, remove the one before, and leave the disk with nothing to do.

        Raises what the save failed with.
        """
        ...

    def prepare_restore(self) -> None:
        """Stand where a new process does before it restores; not part of a restore's time."""
        ...

    def restore(self) -> None:
        """Bring the newest checkpoint, which is finished, back into the live training."""
        ...

    def rest(self) -> None:
        """Behind a restore: end what goes on in the background. Not part of the restore's time.

        The next is `prepare_restore` or `close`.
        """
        ...

    def files(self) -> list[Path]:
        """The files of the newest checkpoint."""
        ...

    def discard(self) -> None:
        """Remove the newest checkpoint, which is finished, unless one must be there to go on."""
        ...

    def close(self) -> None:
        """Let go of threads, processes and memory."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """How to make a saver: ``make(folder, training)``, the folder being its own.

    ``packages``: what must be installed, by the names they are installed under. ``synced``: what
    it calls saved survives a power cut. ``restores_as``: the peer that reads the same files in the
    same way, if that is another one. ``note``: what a reader must know. ``keeps``: how many copies
    of the state it has in host memory between two saves.
    """

    name: str
    make: Callable[[Path, Training], Saver]
    packages: tuple[str, ...]
    synced: bool
    restores_as: str = ""
    note: str = ""
    keeps: float = 0.0
