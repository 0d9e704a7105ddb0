"""What happens between a loop and its manager at an iteration boundary. Training thread only.

Boundaries are reported, restored random generators are set before the first batch, and the run
stops where it has to. The cursor has moved over a boundary before it is reported: the manager
saves the place that belongs to the weights it sees.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from iterators.errors import TrainingStopped
from iterators.protocol import Manager


class Boundaries:
    """The boundaries that one iterator passes in this process.

    ``manager`` is told about them if the iterator ``marks_steps``. ``steps_to_run`` and ``on_stop``
    are ``CFIterator``'s.
    """

    def __init__(
        self,
        manager: Manager | None,
        *,
        marks_steps: bool,
        steps_to_run: int | None,
        on_stop: Literal["raise", "return"],
    ) -> None:
        self._manager = manager
        self._notified = manager if marks_steps else None
        self._steps_to_run, self._on_stop = steps_to_run, on_stop
        self.restart()

    def restart(self) -> None:
        """Start to count again: a position was loaded, and nothing was served since."""
        self.num_passed = 0
        self.has_halted = self._generators_are_set = False

    def uninterrupted(self) -> AbstractContextManager[None]:
        """A context in which the manager holds Ctrl-C back: what is within is done whole."""
        held = getattr(self._manager, "holding_interrupts", None)
        return nullcontext() if held is None else held()

    @property
    def are_reported(self) -> bool:
        """Whether there is a manager that is told about them."""
        return self._notified is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be handed out: halted here, or finished in any process."""
        return self.has_halted or bool(getattr(self._notified, "finished", False))

    def set_generators(self, *, pending: int) -> None:
        """Let the manager set the restored random generators, if the run has not gone on since.

        Call it with the loader's iterator built, which may draw from the generators, and before
        the first batch is fetched. Passes before the first boundary may be taken back, so each of
        them sets the generators again; not with ``pending`` batches, which count for the next
        boundary: what they drew is part of the run.
        """
        gone_on = self.num_passed or pending or self._generators_are_set
        if self._notified is not None and not gone_on:
            self._notified.before_first_batch()

    def set_generators_before_epoch(self, *, pending: int) -> None:
        """Set them now, and not again at the first batch, since a whole epoch is about to begin.

        A script may draw between here and the first batch (shuffled prompts, a mixing weight). An
        unbroken run draws those numbers too, so they must not be taken back.
        """
        self.set_generators(pending=pending)
        self._generators_are_set = True

    def report(self, *, ends_epoch: bool, may_stop: bool) -> None:
        """Tell the manager about a boundary that the cursor has moved over.

        Raises ``TrainingStopped`` if a stop notice was honoured and ``on_stop`` is "raise", but
        not while the run is being closed anyway (``may_stop=False``).
        """
        self.num_passed += 1
        self.has_halted = self.num_passed == self._steps_to_run
        if self._notified is None:
            return
        if ends_epoch:
            self._notified.end_epoch()
        else:
            self._notified.step()
        if may_stop and self._notified.stopped:
            self.has_halted = True
            if self._on_stop == "raise":
                raise TrainingStopped

    def no_update(self, num_batches: int, *, epoch_over: bool) -> None:
        """Tell the manager that the last ``num_batches`` made no boundary due."""
        told = getattr(self._notified, "no_update", None)
        if told is not None:
            told(num_batches, epoch_over=epoch_over)

    def reopens_after(self, error: Exception) -> bool:
        """Whether to open the loader again, which failed because its workers were told to stop.

        The boundary at which the run stops is still to come, and the batches up to it are needed.
        """
        reopens_after = getattr(self._manager, "reopens_after", None)
        return reopens_after is not None and bool(reopens_after(error))

    def stops_after(self, error: Exception) -> bool:
        """Whether the loader failed with ``error`` because the run is being stopped.

        If not, it is for the caller to raise ``error`` again: raised from here, its traceback
        would refer to this frame, this frame to it, and both to the loader's workers.
        """
        stops_after = getattr(self._manager, "stops_after", None)
        if stops_after is None or not stops_after(error):
            return False
        self.has_halted = True
        if self._on_stop == "raise":
            raise TrainingStopped("stopped on request, while its loader failed") from error
        return True
