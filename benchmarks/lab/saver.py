"""The interface of a way to checkpoint, so that benchmarks can compare it with others.

A `Saver` is called at two places in a training loop, where it may stop the training thread: the
boundary between two iterations (where it saves if asked to) and the start of the weight update.
It keeps only the newest checkpoint, and restores it into the live training.
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
    """The saved state: a model and its optimizer, which remain the same objects."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def state(self) -> dict[str, Any]:
        """Their state dicts, as ``model`` and ``optimizer``; the tensors are the live ones."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds until a save was on disk: from its call; from the complete snapshot, if known.

    ``removal_s``: how long `Saver.finish` took to remove the previous checkpoint.
    """

    durable_s: float
    persist_s: float | None = None
    removal_s: float = 0.0


class Saver(Protocol):
    """One way to checkpoint, called where a training loop would call it."""

    def boundary(self, *, save: bool) -> None:
        """Called between two iterations; training stops as long as it takes."""
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Around the weight update; training stops until it has been entered."""
        ...

    def is_durable(self) -> bool:
        """Whether, as far as this rank knows, the last save is on disk, or has failed.

        If files are not synced: whether they were written.
        """
        ...

    def is_quiet(self) -> bool:
        """Whether, in addition, no background work is left, such as a removal."""
        ...

    def finish(self) -> Saved:
        """Wait for the last save, remove the previous one, and leave the disk idle.

        Raises the error of the save.
        """
        ...

    def prepare_restore(self) -> None:
        """Get to the state in which a new process starts to restore; not part of its time."""
        ...

    def restore(self) -> None:
        """Restore the newest checkpoint, which is finished, into the live training."""
        ...

    def rest(self) -> None:
        """After a restore: end the background work. Not part of the restore's time.

        The next call is `prepare_restore` or `close`.
        """
        ...

    def files(self) -> list[Path]:
        """The files of the newest checkpoint."""
        ...

    def discard(self) -> None:
        """Remove the newest, finished checkpoint, unless the saver needs one to continue."""
        ...

    def close(self) -> None:
        """Release threads, processes and memory."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """How to make a saver: ``make(folder, training)``, with a folder for this saver only.

    ``packages``: the distributions that must be installed. ``synced``: whether a saved checkpoint
    survives a power cut. ``restores_as``: the peer that reads the same files in the same way, if it
    is a different one. ``note``: what a reader must know. ``keeps``: how many copies of the state
    it holds in host memory between two saves.
    """

    name: str
    make: Callable[[Path, Training], Saver]
    packages: tuple[str, ...]
    synced: bool
    restores_as: str = ""
    note: str = ""
    keeps: float = 0.0
