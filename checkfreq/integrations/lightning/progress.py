"""Where the trainer's loops stand, as of a boundary, and how they are put back there.

Every boundary in training lies at one place of Lightning's loops: where the epoch loop asks for the
next batch. Lightning's own restart goes other ways (it repeats the checks behind a batch, and with
them a scheduler's step). Here the loops are told that an epoch is under way, which skips the hooks
of its start, and their counters are set once more at the first batch, since the epoch loop resets
them in between. Behind the last epoch there is one boundary more, at the end of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from torch import nn


class LoopProgress:
    """Counters of the fit loop and of all loops in it, and flags that hooks may have changed."""

    def __init__(self, trainer: Any, module: nn.Module) -> None:
        self._trainer, self._module = trainer, module
        self._loaded: dict[str, Any] | None = None

    @property
    def is_in_epoch(self) -> bool:
        """Whether the loops are inside an epoch: begun, and not ended."""
        current = self._trainer.fit_loop.epoch_progress.current
        return bool(current.started > current.processed)

    def state_dict(self) -> dict[str, Any]:
        """The state; equal on all ranks."""
        trainer = self._trainer
        return {
            "loops": trainer.fit_loop.state_dict(),
            "should_stop": trainer.should_stop,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "evaluating": [n for n, one in self._module.named_modules() if not one.training],
            "frozen": [n for n, one in self._module.named_parameters() if not one.requires_grad],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the loops, and have them enter an epoch that is under way."""
        self._loaded = state
        self._apply(state)
        if self.is_in_epoch:
            self._trainer.fit_loop._restart_stage = "restarted_mid_epoch"

    def reach_batch(self) -> None:
        """Set the loops again, now that they ask for the first batch of this process."""
        state, self._loaded = self._loaded, None
        if state is None or not _is_in_epoch(state):
            return
        self._apply(state)
        fit_loop = self._trainer.fit_loop
        fit_loop._data_fetcher.fetched = fit_loop.epoch_loop.batch_progress.current.ready

    def _apply(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(deepcopy(state["loops"]))
        for loop in _loops(trainer.fit_loop):
            loop.on_iteration_done()  # no restart of Lightning's own
        trainer.should_stop = state["should_stop"]
        trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
        evaluating, frozen = set(state["evaluating"]), set(state["frozen"])
        for name, module in self._module.named_modules():
            module.training = name not in evaluating
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad == (name in frozen):
                parameter.requires_grad_(name not in frozen)


def _is_in_epoch(state: dict[str, Any]) -> bool:
    current = state["loops"]["epoch_progress"]["current"]
    return bool(current["started"] > current["processed"])


def _loops(loop: Any) -> Iterator[Any]:
    """A loop and those inside it."""
    yield loop
    for inner in vars(loop).values():
        if hasattr(inner, "on_iteration_done"):
            yield from _loops(inner)
