"""Warns about loops that count batches from 0, which is wrong after a restore in mid-epoch.

A restored pass starts in the middle of its epoch. A loop that counts its batches from 0, for
example with ``enumerate(train_loader)``, then never sees ``i + 1 == len(train_loader)``, and
accumulates gradients over other groups of batches. ``Counting`` records whether the loop asked us
for the true index, and logs where its own count may be wrong. Training thread only.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterator
from inspect import CO_GENERATOR
from types import FrameType, GeneratorType
from typing import Any

logger = logging.getLogger(__name__)

#: Most generators to look through between a loop's ``enumerate`` and our iterator (tqdm is one).
_MOST_WRAPPERS = 3


class Counting:
    """How the loop over one iterator counts its batches. ``name`` is the iterator's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered: int | None = None
        self._asks = self._told = False

    def resumed(self, epoch: int) -> None:
        """The next pass starts in the middle of ``epoch``."""
        self._entered, self._asks, self._told = epoch, False, False

    def asked(self) -> None:
        """The loop asked for a true index."""
        self._asks = True

    def batch_used(
        self, running: Generator[Any, Any, Any] | None, *, epoch: int, batch: int
    ) -> None:
        """The loop is done with a batch, ``batch`` by its index. Logs once after a restore.

        At level WARNING if the loop uses Python's ``enumerate``, else INFO.
        """
        if self._entered != epoch or self._asks or self._told:
            return
        self._told = True
        counts = running is not None and is_enumerated(running)
        logger.log(
            logging.WARNING if counts else logging.INFO,
            "iterator %r resumed at batch %d of epoch %d, but %s: write `for i, batch in "
            "train_loader.enumerate()`, or use train_loader.batch as the index",
            self._name,
            batch,
            epoch,
            "enumerate(train_loader) counts from 0 there, so `i + 1 == len(train_loader)` is "
            "never true"
            if counts
            else "a loop that counts by itself starts from 0 there",
        )

    def epoch_ends(self, epoch: int, *, num_unused: int) -> None:
        """Every batch was served; ``num_unused`` of them came after the last update."""
        if self._entered == epoch and num_unused and not self._asks:
            logger.warning(
                "iterator %r: epoch %d, which was resumed in mid-epoch, ends with %d batch(es) "
                "that no update has used. If the loop should update at the last batch of an "
                "epoch, its weights differ from those of an uninterrupted run from here on: find "
                "it with train_loader.enumerate() or train_loader.batch, not with your own count",
                self._name,
                epoch,
                num_unused,
            )


def is_enumerated(running: Generator[Any, Any, Any]) -> bool:
    """Whether an ``enumerate`` draws from the running generator, perhaps through others.

    An ``enumerate`` has no Python frame, so it can only be found as an object, among all that the
    garbage collector knows. Done once per restore: beside torch these are hundreds of thousands.
    """
    drawing = list(_drawing_from(running))
    return any(
        one is running or (isinstance(one, GeneratorType) and one.gi_frame in drawing)
        for counting in (gc.get_objects() if drawing else gc.get_referrers(running))
        if type(counting) is enumerate
        for one in gc.get_referents(counting)
    )


def _drawing_from(running: Generator[Any, Any, Any]) -> Iterator[FrameType]:
    """The frames of the generators that are asking for the next item, the nearest first."""
    frame: FrameType | None = running.gi_frame  # type: ignore[attr-defined]  # a function makes it
    for _ in range(_MOST_WRAPPERS):
        frame = frame and frame.f_back
        if frame is None or not frame.f_code.co_flags & CO_GENERATOR:
            return
        yield frame
