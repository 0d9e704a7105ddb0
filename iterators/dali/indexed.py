"""``DALILoader``: a built DALI iterator over our reader, entered anywhere without rebuilding it.

DALI prefetches from the moment it is built, so to enter another place the source ends its pass,
what is still in the pipeline is thrown away, and ``reset`` lets it prefetch from there: a few
batches of work, at any place of any data set. Where the pipeline already stands at the place,
nothing is thrown away. Training thread only; one open epoch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from iterators.dali import graph
from iterators.dali.library import __version__
from iterators.dali.source import Aim, Record
from iterators.order import Order
from iterators.position import Identity, Layout
from iterators.protocol import Adapter, Delivery

_VERSIONS = (("dali", __version__), ("numpy", np.__version__), ("torch", str(torch.__version__)))


class DALILoader(Adapter):
    """A ``DALIGenericIterator`` or ``DALIClassificationIterator`` that ``CFIterator`` can enter.

    Its one pipeline reads with ``iterators.dali.FileReader`` and draws no random numbers of its
    own; leave ``size`` and ``reader_name`` out. ``auto_reset``, ``prepare_first_batch`` and the
    pipeline's settings are free; ``last_batch_policy`` has no effect in DALI without a size, and
    the last batch has exactly the samples that are left. Batches are what the iterator hands
    out: a list of one dictionary. ``seed`` is the reader's unless the reader was given none.

    The iterator now belongs to this loader. Raises ``NotResumableError`` with the reason for one
    that cannot be resumed exactly, ``ValueError`` for two seeds.
    """

    def __init__(self, iterator: Any, *, seed: int | None = None) -> None:
        self._iterator = iterator
        self._pipeline = graph.sole_pipeline(iterator)
        self._source = graph.sole_source(self._pipeline)
        graph.require_endless(iterator)
        self._direct = graph.direct_outputs(iterator, self._pipeline, self._source)
        self._share = self._source.share
        self._recipe = self._source.recipe
        if seed is not None and self._source.seed not in (None, seed):
            raise ValueError(f"seed is {seed} here and {self._source.seed} in the FileReader")
        self._seed = (self._source.seed if seed is None else seed) or 0
        order = self.order(0)
        self._identity = Identity(
            order.algorithm, order.n, self._recipe.fingerprint, self._seed, self._share.tail
        )
        self._open: DALIDeliveries | None = None

    @property
    def identity(self) -> Identity:
        """What must agree when a position is restored."""
        return self._identity

    @property
    def layout(self) -> Layout:
        """How the data is spread now; DALI's threads are no workers."""
        return Layout(self._share.world, self._share.batch, 0, versions=_VERSIONS)

    @property
    def rank(self) -> int:
        """This process's rank among those that share the data."""
        return self._share.rank

    @property
    def origin(self) -> tuple[int, int]:
        """(epoch, place) where a run begins that restored no position."""
        return self._source.origin

    def name_of(self, sample: int) -> str:
        """The path of ``sample``, relative to the reader's root."""
        return self._recipe.files.name(sample)

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        return self.batches_left(0)

    def batches_left(self, start: int) -> int:
        """Batches from place ``start`` to the end of an epoch."""
        return self._share.batches(len(self._recipe.files) - start)

    def order(self, epoch: int) -> Order:
        """The order of ``epoch``."""
        return self._recipe.order(self._seed, epoch)

    def open(self, *, epoch: int, start: int, state: object = None) -> DALIDeliveries:
        """Let the pipeline prefetch from place ``start`` on; nothing is handed out here."""
        self.close()
        self._open = DALIDeliveries(self, self.batches_left(start))
        if self.batches_left(start):
            self._enter(Aim(self._seed, epoch, start))
        return self._open

    def close(self) -> None:
        """Close the open epoch; the pipeline lives as long as its iterator."""
        if self._open is not None:
            self._open.close()

    def _enter(self, aim: Aim) -> None:
        self._forget_handed_out()
        if self._source.front != aim:
            self._source.turn(aim)
            for _ in range(self._source.num_produced):
                self.fetch()
        if graph.was_started(self._iterator) and not self._source.num_produced:
            self._iterator.reset()

    def _forget_handed_out(self) -> None:
        """Batches that someone took from the DALI iterator without us."""
        waiting = graph.num_prefetched(self._iterator, self._pipeline)
        for _ in range(self._source.num_produced - waiting):
            self._source.take()

    def fetch(self) -> tuple[Record, Any]:
        """The next batch of the DALI iterator, checked against what the source produced for it."""
        try:
            data = next(self._iterator)
        except RuntimeError as error:
            error.add_note(f"The files of this batch: {self._names_in_front()}")
            raise
        record = self._source.take()
        for key, tensor in data[0].items():
            if len(tensor) != len(record.ids):
                raise RuntimeError(
                    f"DALI delivered {len(tensor)} samples in {key!r} where the reader produced "
                    f"{len(record.ids)}: every sample must go through the pipeline once"
                )
        for key, name in self._direct.items():
            if not np.array_equal(data[0][key].numpy(), self._recipe.output(name, record)):
                raise RuntimeError(f"DALI delivered another {name} in {key!r} than it was fed")
        return record, data

    def _names_in_front(self) -> str:
        record = self._source.peek()
        return "unknown" if record is None else ", ".join(map(self.name_of, record.ids.tolist()))


class DALIDeliveries:
    """One opened epoch of a ``DALILoader``."""

    def __init__(self, loader: DALILoader, num_batches: int) -> None:
        self._loader, self._left = loader, num_batches

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        if not self._left:
            raise StopIteration
        record, data = self._loader.fetch()
        self._left -= 1
        return Delivery(data, record.end, record.ids, record.weights)

    def close(self) -> None:
        """Hand out nothing more; what is prefetched stays in the pipeline."""
        self._left = 0
