"""An arm of `benchmarks.windows`, and what its manager did in each window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.events import events
from benchmarks.windows import FrozenArm, Window


@dataclass(frozen=True, slots=True)
class Note:
    """Of one window: seconds held, waited at updates, and its durable checkpoints' steps."""

    held_s: float
    wait_s: float
    steps: range
    checkpoints: int


class NotedArm:
    """A frozen arm that writes a note of each window; see `benchmarks.windows.Arm`."""

    def __init__(self, arm: FrozenArm) -> None:
        self._arm = arm
        self.iterations = arm.iterations
        self.notes: list[Note] = []

    @property
    def taken(self) -> float:
        """See Arm."""
        return self._arm.taken

    def window(self) -> Window:
        """See Arm."""
        before, waited_s = self._arm.manager.stats(), self._waited_s()
        window = self._arm.window()
        after = self._arm.manager.stats()
        self.notes.append(
            Note(
                held_s=after["stall_s"] - before["stall_s"],
                wait_s=self._waited_s() - waited_s,
                steps=range(before["global_step"] + 1, after["global_step"] + 1),
                checkpoints=after["num_committed"] - before["num_committed"],
            )
        )
        return window

    def _waited_s(self) -> float:
        """How long weight updates have waited for copies so far."""
        return self._arm.manager._pipeline.held.fence_s

    def close(self) -> None:
        """See Arm."""
        self._arm.close()


@dataclass(frozen=True, slots=True)
class Noted:
    """Some windows together. Seconds; ``held_s`` and ``wait_s`` per checkpoint."""

    checkpoints: int
    held_s: float
    wait_s: float
    events: list[dict[str, Any]]

    @classmethod
    def of(cls, notes: Sequence[Note], folder: Path) -> Noted:
        """With the events of their checkpoints."""
        count = sum(each.checkpoints for each in notes)
        return cls(
            checkpoints=count,
            held_s=sum(each.held_s for each in notes) / count,
            wait_s=sum(each.wait_s for each in notes) / count,
            events=[
                x for x in events(folder, "committed") if any(x["step"] in y.steps for y in notes)
            ],
        )
