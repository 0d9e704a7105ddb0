"""Warns about loops that count batches from 0, which is wrong after a restore in mid-epoch.

A restored pass starts in the middle of its epoch. A loop that counts its batches from 0, for
example with ``enumerate(train_loader)``, then never sees ``i + 1 == len(train_loader)``, and
accumulates gradients over other groups of batches. One that leaves each epoch after so many batches
(a ``break``, ``islice``) leaves this one too late. ``Counting`` records whether the loop asked us
for the true index, and logs where its own count may be wrong. Training thread only.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Generator, Iterator
from inspect import CO_GENERATOR
from itertools import islice
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
        self._asks = self._told = self._told_of_end = False
        self._start = self._end = self._left_after = 0

    def resumed(self, epoch: int, batch: int = 0, left_after: int = 0) -> None:
        """The next pass starts at ``batch`` of ``epoch``.

        ``left_after``: the batches after which an earlier epoch was left; 0 if none was.
        """
        self._entered, self._asks, self._told = epoch, False, False
        self._start, self._end, self._left_after = batch, 0, left_after
        self._told_of_end = False

    def asked(self) -> None:
        """The loop asked for a true index."""
        self._asks = True

    def batch_used(
        self, running: Generator[Any, Any, Any] | None, *, epoch: int, batch: int
    ) -> None:
        """The loop is done with a batch, ``batch`` by its index, and asks for the next.

        Logs once after a restore: at level WARNING if the loop uses Python's ``enumerate`` or
        ``islice``, else INFO. And once if it goes on where it left an earlier epoch.
        """
        if self._entered != epoch or self._asks:
            return
        if not self._told:
            self._told = True
            self._tell(counter_of(running) if running is not None else None, epoch, batch)
        if self._start < self._left_after <= batch + 1:
            self._tell_of_end(
                self._left_after,
                f"an epoch before was left after {self._left_after} batches; epoch {epoch}, which "
                f"was resumed after {self._start}, goes on there",
            )

    def _tell(self, kind: type | None, epoch: int, batch: int) -> None:
        if kind is islice:
            self._told_of_end = True
            logger.warning(
                "iterator %r resumed at batch %d of epoch %d, but islice(train_loader, n) counts "
                "from 0 there, and so takes n more unless its n is what is left: write "
                "CFIterator(..., batches_per_epoch=n), and loop over train_loader without islice",
                self._name,
                batch,
                epoch,
            )
            return
        logger.log(
            logging.WARNING if kind is not None else logging.INFO,
            "iterator %r resumed at batch %d of epoch %d, but %s: write `for i, batch in "
            "train_loader.enumerate()`, or use train_loader.batch as the index",
            self._name,
            batch,
            epoch,
            "a loop that counts by itself starts from 0 there"
            if kind is None
            else "enumerate(train_loader) counts from 0 there, so `i + 1 == len(train_loader)` is "
            "never true",
        )

    def epoch_ended(self, epoch: int, batches: int, *, was_left: bool) -> None:
        """The loop ended an epoch after so many ``batches``; ``was_left``: it left some of them."""
        if self._entered is None or self._asks:
            return
        if epoch == self._entered:
            self._end = batches
        elif was_left and 0 < batches < self._end <= self._start + batches:
            self._tell_of_end(
                batches,
                f"epoch {epoch} was left after {batches} batches, but epoch {self._entered}, which "
                f"was resumed after {self._start}, went on to {self._end}",
            )

    def _tell_of_end(self, batches: int, found: str) -> None:
        if not self._told_of_end:
            self._told_of_end = True
            logger.warning(
                "iterator %r: %s. A loop that ends its epochs by a count of its own (break, "
                "islice) counts from 0 in a resumed process, and serves too many batches: write "
                "CFIterator(..., batches_per_epoch=%d) instead",
                self._name,
                found,
                batches,
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


def counter_of(running: Generator[Any, Any, Any]) -> type | None:
    """``enumerate`` or ``islice``, if one draws from the generator, perhaps through others.

    Neither has a Python frame, so it can only be found as an object, among all that the garbage
    collector knows. Done once per restore: beside torch these are hundreds of thousands.
    """
    drawing = list(_drawing_from(running))
    return next(
        (
            type(one)
            for one in (gc.get_objects() if drawing else gc.get_referrers(running))
            if type(one) in (enumerate, islice)
            for drawn in gc.get_referents(one)
            if drawn is running or (isinstance(drawn, GeneratorType) and drawn.gi_frame in drawing)
        ),
        None,
    )


def _drawing_from(running: Generator[Any, Any, Any]) -> Iterator[FrameType]:
    """The frames of the generators that are asking for the next item, the nearest first."""
    frame: FrameType | None = running.gi_frame  # type: ignore[attr-defined]  # a function makes it
    for _ in range(_MOST_WRAPPERS):
        frame = frame and frame.f_back
        if frame is None or not frame.f_code.co_flags & CO_GENERATOR:
            return
        yield frame
