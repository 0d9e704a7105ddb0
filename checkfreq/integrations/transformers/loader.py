"""Our loader where the ``Trainer`` expects accelerate's. Training thread only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from iterators import CFIterator
from iterators.protocol import Adapter


class TrainLoader:
    """The train loader that the ``Trainer`` gets.

    It asks for the length and the dataset before there is a manager, so ``batches``, which serves
    them, is set later.
    """

    def __init__(self, adapter: Adapter, plain: Any) -> None:
        self.adapter = adapter
        self.dataset: Any = getattr(plain, "dataset", None)
        self.batches: CFIterator | None = None

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch; ``TypeError`` if the dataset has no length."""
        whole = self.adapter.num_batches()
        if whole is None:
            raise TypeError("the dataset has no length")
        return whole

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch, from the restored place on."""
        assert self.batches is not None, "the Trainer iterates before it has prepared the model"
        return iter(self.batches)


class RestOfEpoch(int):
    """The batches left in an epoch whose first ``skipped`` ones were used by another process.

    The Trainer counts batches from 0 in each call of ``_run_epoch``, and divides by their number
    to get the fraction of the epoch. Divided by this number, what is left of an epoch continues
    where the other process ended: ``(1 + i) / rest == (skipped + 1 + i) / whole``, to the bit.
    """

    _whole: int

    def __new__(cls, whole: int, skipped: int) -> RestOfEpoch:
        rest = super().__new__(cls, whole - skipped)
        rest._whole = whole
        return rest

    def __rtruediv__(self, used: int) -> float:
        return (self._whole - int(self) + used) / self._whole


@contextmanager
def unprepared(accelerator: Any) -> Iterator[None]:
    """Have ``accelerator.prepare`` return a loader as it is: ours shares the data itself."""

    def prepare(*given: Any, **_: Any) -> Any:
        return given[0] if len(given) == 1 else given

    accelerator.prepare = prepare
    try:
        yield
    finally:
        del accelerator.prepare
