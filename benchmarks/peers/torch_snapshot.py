"""torchsnapshot: ``Snapshot.take`` and ``async_take``, with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lab.saver import Training
from benchmarks.peers.folders import Pending


class TorchSnapshot:
    """``aside``: it copies the tensors, and writes in a thread."""

    def __init__(self, training: Training, *, aside: bool) -> None:
        self._state: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
        self._aside = aside

    def save(self, folder: Path) -> Pending | None:
        """Returns when everything is written, or every tensor is copied."""
        from torchsnapshot import Snapshot

        if not self._aside:
            Snapshot.take(str(folder), self._state)
            return None
        return Pending(Snapshot.async_take(str(folder), self._state).wait)

    def load(self, folder: Path) -> None:
        """Read into the live tensors."""
        from torchsnapshot import Snapshot

        Snapshot(str(folder)).restore(self._state)

    def close(self) -> None:
        """Nothing to release."""
