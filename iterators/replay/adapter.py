"""The last resort, behind ``exact=False``: resume any iterable by running it up to the place.

A place is a number of batches. Skipping takes as long as loading, and is exact only if the loader
yields the same batches again; the log says both. An epoch ends when the loader does. Its length is
not relied on, so one batch is fetched ahead at each boundary. Training process only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from iterators.errors import ResumeMismatchError
from iterators.order.fingerprint import length_or_none
from iterators.order.position import Identity, Layout
from iterators.protocol import Adapter, Delivery
from iterators.replay.lookahead import LookAhead
from iterators.replay.skipping import Skipping

logger = logging.getLogger(__name__)


class ReplayAdapter(Adapter):
    """Any iterable of batches, which are counted. ``clock`` returns seconds, for the log."""

    def __init__(
        self, loader: Iterable[Any], *, seed: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loader, self._clock = loader, clock
        self._identity = Identity("replay-1", 0, type(loader).__qualname__, seed, "short")
        self._open: ReplayedDeliveries | None = None

    @property
    def identity(self) -> Identity:
        """The class of the loader, which is all that can be checked."""
        return self._identity

    @property
    def layout(self) -> Layout:
        """Unknown."""
        return Layout()

    @property
    def rank(self) -> int:
        """Unknown: each process replays its own loader."""
        return 0

    def num_batches(self) -> int | None:
        """The length of the loader; None if it has none."""
        return length_or_none(self._loader)

    def batches_left(self, start: int) -> None:
        """Unknown until the loader ends."""
        return

    def is_over(self, place: int) -> bool:
        """Whether the open epoch ends here. Fetches the next batch to find out, and keeps it."""
        return self._open is not None and self._open.is_over()

    def open(self, *, epoch: int, start: int, state: Any = None) -> ReplayedDeliveries:
        """Start the loader and discard ``start`` batches."""
        for owner in (self._loader, getattr(self._loader, "sampler", None)):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(epoch)
        batches = iter(self._loader)
        if start:
            self._skip(batches, start)
        self._open = ReplayedDeliveries(batches, start)
        return self._open

    def _skip(self, batches: Iterator[Any], count: int) -> None:
        skipping = Skipping(count, clock=self._clock)
        for skipped in range(count):
            try:
                next(batches)
            except StopIteration:
                skipping.close()
                raise ResumeMismatchError(
                    "the number of batches of the loader",
                    expected=f"at least {count}",
                    found=skipped,
                    advice=f"To be resumed by replay, {type(self._loader).__name__} must yield "
                    "the same batches again.",
                ) from None
            skipping.advance(1)
        logger.warning(
            "skipped %d batches by loading them again, which took %.1f s; the order is exact only "
            "if %s yields the same batches again",
            count,
            skipping.close(),
            type(self._loader).__name__,
        )


class ReplayedDeliveries:
    """An opened epoch of a counted iterable."""

    def __init__(self, batches: Iterator[Any], start: int) -> None:
        self._batches = LookAhead(batches.__next__)
        self._place = start

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        data = next(self._batches)
        self._place += 1
        return Delivery(data, self._place)

    def is_over(self) -> bool:
        """Whether no batch is left."""
        return self._batches.is_over()

    def close(self) -> None:
        """Release the loader's iterator."""
        self._batches.close()
