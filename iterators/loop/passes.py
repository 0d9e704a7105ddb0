"""One pass: a single ``for batch in iterator`` loop, from its first batch to what ended it.

How a pass ended decides what the next loop means, and that can only be decided when the next loop
begins: code after a ``for`` statement (validation, a scheduler, a last weight update) still belongs
to the epoch. So a pass first *ends*, in one of three states, and is *settled* later. ``Pass`` is
pure: no loader, no cursor, no manager but through ``BoundaryRule``. Training thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from iterators.loop.boundary_rule import BoundaryRule
from iterators.loop.cursor import Progress


class PassState(Enum):
    """The states of a pass; ``MOVES`` lists the legal changes."""

    OPEN = "its generator is running, or suspended and still referenced"
    EXHAUSTED = "every batch was served: the epoch is over, its last boundary is still to be passed"
    LEFT = "left early: the epoch is over if an update used any of its batches"
    PAUSED = "left early by steps(), or by an error: the next pass continues here"
    SETTLED = "nothing is pending: the next pass starts at the cursor"


MOVES: Mapping[PassState, frozenset[PassState]] = {
    PassState.OPEN: frozenset(PassState) - {PassState.OPEN},
    PassState.EXHAUSTED: frozenset({PassState.SETTLED}),
    PassState.LEFT: frozenset({PassState.PAUSED, PassState.SETTLED}),
    PassState.PAUSED: frozenset({PassState.SETTLED}),
    PassState.SETTLED: frozenset(),
}


class Settlement(Enum):
    """What has to be done about a pass before the next one starts."""

    NOTHING = "continue at the cursor"
    CLOSE_EPOCH = "close the epoch, and pass its last boundary if one is due"
    TAKE_BACK = "serve the batches since the last boundary again"
    PASS_BOUNDARY = "pass the boundary that is due, within the epoch"


class Pass:
    """One pass over an epoch. ``start`` is the cursor's progress when it begins."""

    def __init__(
        self,
        rule: BoundaryRule,
        start: Progress,
        *,
        state: PassState = PassState.SETTLED,
        attempts: int = 0,
    ) -> None:
        self.state, self.was_left = state, False
        #: The progress to go back to if what was handed out since then was not used.
        self.last_boundary = start
        self._rule, self._attempts_before = rule, attempts
        self._num_boundaries = 0

    @classmethod
    def opened(cls, rule: BoundaryRule, start: Progress) -> Pass:
        """A pass whose first batch is about to be fetched."""
        return cls(rule, start, state=PassState.OPEN, attempts=rule.attempts)

    def boundary_passed(self, progress: Progress) -> None:
        """A boundary was passed at ``progress``: nothing before it is ever taken back."""
        self.last_boundary = progress
        self._num_boundaries += 1

    def has_trained(self, pending: int) -> bool:
        """Whether an update used a batch of this pass, so that its batches must not come again.

        ``pending``: batches handed out since the last boundary. They may include gradients carried
        over from an earlier pass, hence the look at updates since this pass began.
        """
        if self._num_boundaries:
            return True
        if self._rule.no_update_since(self._attempts_before):
            return False
        if self.state is PassState.LEFT and pending:
            pending += self._rule.lookahead  # nothing more came, so nothing is ahead
        return self._rule.is_due(pending, epoch_over=self.state is PassState.EXHAUSTED)

    def end(self, state: PassState) -> None:
        """The generator has ended, in ``state``."""
        assert self.state is PassState.OPEN, f"a pass that is {self.state.name} cannot end"
        self._move(state)
        self.was_left = state is PassState.LEFT

    def pause(self) -> None:
        """A pass that was left is to be continued after all: the run closes in mid-epoch."""
        self._move(PassState.PAUSED)

    def settle(self) -> None:
        """The settlement was carried out.

        An open pass stays open: the manager may close the run from within a boundary, while the
        pass's generator is running and cannot be ended.
        """
        if self.state not in (PassState.OPEN, PassState.SETTLED):
            self._move(PassState.SETTLED)

    def settlement(self, pending: int) -> Settlement:
        """What the next loop, or a clean close, has to do about this pass first."""
        if self.state is PassState.EXHAUSTED:
            return Settlement.CLOSE_EPOCH
        if self.state is PassState.LEFT:
            used = self.has_trained(pending)
            return Settlement.CLOSE_EPOCH if used else Settlement.TAKE_BACK
        if self.state is PassState.PAUSED:
            return self._settlement_of_pause(pending)
        return Settlement.NOTHING

    def _settlement_of_pause(self, pending: int) -> Settlement:
        if self._rule.is_due(pending):
            return Settlement.PASS_BOUNDARY
        # Under accumulate=N the gradients of a group that is not full are still in the model, so
        # its batches must not come again.
        return Settlement.NOTHING if self._rule.counts_batches else Settlement.TAKE_BACK

    def _move(self, state: PassState) -> None:
        assert state in MOVES[self.state], f"{self.state.name} -> {state.name} is no legal move"
        self.state = state
