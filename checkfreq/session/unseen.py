"""Warns if batches come and go and no weight update is seen: no boundary is passed then.

The manager sees updates in ``step()`` of optimizers and in ``updating()``. Weights that are written
in another way make no boundary due, so the run would end without a checkpoint. It is told apart
from gradients that accumulate over many batches by a few small weights, as they were before the
first batch. Training thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from checkfreq.state.adapters.optimizer_load import parameters_of
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.dtensors import local_of

logger = logging.getLogger("checkfreq.manager")

#: So many of the smallest weights are compared.
_MOST_COMPARED = 8

_REMEDY = (
    "An update is seen in step() of a tracked optimizer, CFCheckpoint(..., optimizer=optimizer); "
    "put any other write of weights into `with cf_manager.updating():`. A loop that trains nothing "
    "takes train_loader.evaluate(), or a CFIterator(..., marks_steps=False) of its own"
)


class Unseen:
    """Until the first boundary of this process, whether weights change; said once, and at close."""

    def __init__(self, chk: CFCheckpoint) -> None:
        self._chk = chk
        self._before: list[tuple[Tensor, Tensor]] | None = None
        self._is_told = False

    def before_first_batch(self) -> None:
        """Remember a few weights."""
        if self._before is None:
            few = sorted(self._trained(), key=Tensor.numel)[:_MOST_COMPARED]
            self._before = [(one, local_of(one).detach().clone()) for one in few]

    def pass_boundary(self) -> None:
        """Updates are seen."""
        self._before = []

    def no_update(self, num_batches: int, *, epoch_over: bool) -> None:
        """So many batches were handed out since the last update, those of a whole epoch or not.

        Within an epoch it is said only if weights have changed: gradients may be accumulating.
        """
        if self._is_told or not (epoch_over or self._has_changed()):
            return
        self._is_told = True
        logger.warning(
            "%s, but no weight update was seen in %d batches: no boundary is passed, and no "
            "checkpoint taken. %s",
            "weights have changed" if self._has_changed() else "an epoch is over",
            num_batches,
            _REMEDY,
        )

    def close(self, num_updates: int) -> None:
        """The run ends well, and has passed no boundary."""
        if num_updates:
            logger.warning(
                "no checkpoint was taken: %d weight update(s) were seen, and no boundary was "
                "passed. Call cf_manager.step() after each update, or iterate over "
                "CFIterator(loader, cf_manager=cf_manager), which does",
                num_updates,
            )
        elif self._is_told:
            logger.warning("no checkpoint was taken: no weight update was seen. %s", _REMEDY)

    def _trained(self) -> Iterator[Tensor]:
        """Parameters that an update may change, each once."""
        tracked = self._chk.tracked.values()
        groups = [
            *(parameters_of(one) for one in self._chk.optimizers.values()),
            *(one.parameters() for one in tracked if isinstance(one, nn.Module)),
        ]
        found = {id(one): one for group in groups for one in group if one.requires_grad}
        for one in found.values():
            if not nn.parameter.is_lazy(one) and not one.is_meta and one.numel():
                yield one

    def _has_changed(self) -> bool:
        return any(not torch.equal(local_of(now), then) for now, then in self._before or ())
