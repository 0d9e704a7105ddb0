"""The places of batches as a loop counts them: right after a restore only if we are asked.

After a restore in mid-epoch a pass begins in the middle, so whoever counts batches from 0, as
``enumerate(train_loader)`` does, sees ``i + 1 == len(train_loader)`` at no batch. ``Counting``
knows whether the loop asked for the true index, and says where it may be wrong.
Training thread only.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterator
from inspect import CO_GENERATOR
from types import FrameType, GeneratorType
from typing import Any

logger = logging.getLogger(__name__)

#: Generators and the like between a loop's ``enumerate`` and our iterator (tqdm is one).
_MOST_WRAPPERS = 3


class Counting:
    """What is known of how the loop over one iterator counts. ``name`` is the iterator's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered: int | None = None
        self._asks = self._told = False

    def resumed(self, epoch: int) -> None:
        """The next pass begins in the middle of ``epoch``."""
        self._entered, self._asks, self._told = epoch, False, False

    def asked(self) -> None:
        """The loop was told a true index."""
        self._asks = True

    def batch_used(
        self, running: Generator[Any, Any, Any] | None, *, epoch: int, batch: int
    ) -> None:
        """The loop is done with its first batch (``batch``) after a restore; says so once.

        A WARNING if ``enumerate`` is what iterates: finding that out visits every object once.
        """
        if self._entered != epoch or self._asks or self._told:
            return
        self._told = True
        counts = running is not None and is_enumerated(running)
        logger.log(
            logging.WARNING if counts else logging.INFO,
            "iterator %r went on at batch %d of epoch %d, and %s: write `for i, batch in "
            "train_loader.enumerate()`, or use train_loader.batch as the index",
            self._name,
            batch,
            epoch,
            "enumerate(train_loader) counts from 0 there, so that `i + 1 == len(train_loader)` "
            "never comes"
            if counts
            else "what a loop counts by itself begins at 0 there",
        )

    def epoch_ends(self, epoch: int, *, num_unused: int) -> None:
        """Every batch was served; ``num_unused``: how many came after the last update."""
        if self._entered == epoch and num_unused and not self._asks:
            logger.warning(
                "iterator %r: epoch %d, which was resumed in its middle, ends with %d batch(es) "
                "that no update has used. If the loop updates at the epoch's last batch, an "
                "uninterrupted run has other weights from here on: find that batch by "
                "train_loader.enumerate() or train_loader.batch, not by a count of your own",
                self._name,
                epoch,
                num_unused,
            )


def is_enumerated(running: Generator[Any, Any, Any]) -> bool:
    """Whether an ``enumerate`` draws from the generator that runs, perhaps through others.

    Visits every object that the garbage collector knows: some ten milliseconds.
    """
    drawing = list(_drawing_from(running))
    return any(
        one is running or (isinstance(one, GeneratorType) and one.gi_frame in drawing)
        for counting in gc.get_objects()
        if type(counting) is enumerate
        for one in gc.get_referents(counting)
    )


def _drawing_from(running: Generator[Any, Any, Any]) -> Iterator[FrameType]:
    """The generators that have asked for the next item, the nearest first."""
    frame: FrameType | None = running.gi_frame  # type: ignore[attr-defined]  # a function makes it
    for _ in range(_MOST_WRAPPERS):
        frame = frame and frame.f_back
        if frame is None or not frame.f_code.co_flags & CO_GENERATOR:
            return
        yield frame
