"""Where a run stands: the step it is at, and what has begun and ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from checkfreq.persist.attempts import Marks


@dataclass(slots=True)
class Progress:
    """The state of one run in this process; changed in the training thread only."""

    #: Boundaries passed since training began, those before a restore included.
    global_step: int = 0
    #: The step that ``restore`` brought back; None on a first run.
    restored_step: int | None = None
    #: Where it was: "memory", "directory" or "mirror".
    restored_from: str | None = None
    #: Marks of the checkpoint that ``save`` asked for between boundaries.
    requested: Marks | None = None
    #: Puts restored generators and gradients in place once more, until the first boundary.
    apply_last: Callable[[], None] | None = None
    #: Why the live objects must not be used any more, after a restore that failed; "" if they may.
    spoiled: str = ""
    #: Whether the last restore failed since a disk or a server did not answer.
    is_cut_off: bool = False
    is_open: bool = False
    #: Whether training may begin in a directory that holds checkpoints.
    may_start: bool = False
    has_iterated: bool = False
    is_stopping: bool = False
    has_stopped: bool = False
    is_finished: bool = False
    is_closed: bool = False

    def take_requested(self) -> Marks:
        """The marks of a requested checkpoint, which this one is; none if none was requested."""
        marks, self.requested = self.requested or Marks(), None
        return marks

    def request(self, marks: Marks) -> None:
        """Ask for a checkpoint at the next boundary, or add to the request there is."""
        if self.requested is None:
            self.requested = Marks()
        self.requested.merge(marks)
