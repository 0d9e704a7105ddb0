"""The last resort, behind ``exact=False``: resume any iterable by running it up to the place.

A place is a number of batches. Skipping costs what the loader costs, and is exact only if the
loader gives the same batches again; both are said in the log. Training process only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from iterators.fingerprint import length_or_none
from iterators.position import Identity, Layout
from iterators.protocol import Adapter, Delivery
from iterators.skipping import Skipping

logger = logging.getLogger(__name__)


class ReplayAdapter(Adapter):
    """Any iterable of batches, counted. ``clock`` gives seconds, for the log."""

    def __init__(
        self, loader: Iterable[Any], *, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loader, self._clock = loader, clock
        self._length = length_or_none(loader)
        self._identity = Identity(
            "replay-1", self._length or 0, type(loader).__qualname__, seed, "short"
        )

    @property
    def identity(self) -> Identity:
        """The loader's class and length: all that can be checked."""
        return self._identity

    @property
    def layout(self) -> Layout:
        """Unknown."""
        return Layout()

    @property
    def rank(self) -> int:
        """Unknown: each process replays its own loader."""
        return 0

    def batches_left(self, start: int) -> int | None:
        """Batches to the epoch's end; None if the loader has no length."""
        return None if self._length is None else self._length - start

    def open(self, *, epoch: int, start: int, state: Any = None) -> ReplayedDeliveries:
        """Start the loader and throw ``start`` batches away."""
        for owner in (self._loader, getattr(self._loader, "sampler", None)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)
        batches = iter(self._loader)
        if start:
            self._skip(batches, start)
        return ReplayedDeliveries(batches, start)

    def _skip(self, batches: Iterator[Any], count: int) -> None:
        skipping = Skipping(count, clock=self._clock)
        for _ in range(count):
            next(batches, None)
            skipping.advance(1)
        logger.warning(
            "skipped %d batches by loading them again, which took %.1f s; the order is exact only "
            "if %s repeats itself",
            count,
            skipping.close(),
            type(self._loader).__name__,
        )


class ReplayedDeliveries:
    """An opened epoch of a counted iterable."""

    def __init__(self, batches: Iterator[Any], start: int) -> None:
        self._batches: Iterator[Any] | None = batches
        self._place = start

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        if self._batches is None:
            raise StopIteration
        data = next(self._batches)
        self._place += 1
        return Delivery(data, self._place)

    def close(self) -> None:
        """Let go of the loader's iterator."""
        self._batches = None
