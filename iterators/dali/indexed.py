"""``DALILoader``: enters a built DALI iterator over our reader at any place, without rebuilding it.

DALI prefetches from the moment it is built. To enter a different place, the source seeks to it, and
the batches that are still in the pipeline are discarded while it refills from the new place: a few
batches of work, wherever the place is. If the pipeline is at the place already, nothing is
discarded. The source continues from one epoch to the next without an end, so the first batches of
the next epoch are made while the last ones of this epoch are used.

Before each batch, the number of batches in DALI must equal the number that the source has produced
and nobody has taken. Training thread only; one open epoch at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from iterators.dali import graph
from iterators.dali.imports import __version__
from iterators.dali.operators import sole_pipeline
from iterators.dali.source import BatchStart, Record
from iterators.errors import IterationStateError, add_note
from iterators.order.epoch import Order
from iterators.order.position import Identity, Layout
from iterators.protocol import Adapter, Delivery

_VERSIONS = (("dali", __version__), ("numpy", np.__version__), ("torch", str(torch.__version__)))

logger = logging.getLogger(__name__)


class DALILoader(Adapter):
    """A ``DALIGenericIterator`` or ``DALIClassificationIterator`` that ``CFIterator`` can enter.

    ::

        iterator = DALIClassificationIterator(pipeline())  # reads with iterators.dali.FileReader
        train_loader = CFIterator(DALILoader(iterator), cf_manager=manager)
        for epoch in train_loader.epochs(90):
            for [batch] in train_loader:
                train_step(batch["data"], batch["label"])

    The iterator must run one pipeline that reads with ``FileReader`` and draws no random numbers of
    its own. Leave ``size`` and ``reader_name`` out. ``auto_reset``, ``prepare_first_batch`` and the
    settings of the pipeline are free; ``last_batch_policy`` has no effect in DALI without a size,
    and the last batch has exactly the samples that are left. Batches are those of the iterator: a
    list of one dictionary.

    ``seed`` is the reader's; if neither has one, torch's initial seed (``torch.manual_seed``), rank
    0's on all ranks. A restored run keeps its own.

    The iterator belongs to this loader from now on. If it is used elsewhere, or given to a second
    loader, the next batch raises ``IterationStateError``. After an error in a batch (a file that
    cannot be read, for example) the next pass starts at that batch; but with ``exec_dynamic=False``
    DALI cannot continue, and the pipeline must be built again.

    Raises ``NotResumableError`` with the reason for an iterator that cannot resume exactly, and
    ``ValueError`` for two different seeds. The iterator does not change then.
    """

    def __init__(self, iterator: Any, *, seed: int | None = None) -> None:
        self._iterator = iterator
        self._pipeline = sole_pipeline(iterator)
        self._source = graph.sole_source(self._pipeline)
        graph.require_no_size(iterator)
        self._direct = graph.direct_outputs(iterator, self._pipeline, self._source)
        self._share = self._source.share
        self._spec = self._source.spec
        if seed is not None and self._source.seed not in (None, seed):
            raise ValueError(f"seed is {seed} here and {self._source.seed} in the FileReader")
        given = self._source.seed if seed is None else seed
        self._takes_seed = given is None
        self._seed = self._source.first_seed if given is None else given
        order = self.order(0)
        self._identity = Identity(
            order.algorithm, order.n, self._spec.fingerprint, self._seed, self._share.tail
        )
        self._open: DALIDeliveries | None = None
        self._has_stopped = False
        self._source.owner = self._ownership = object()
        self._source.endless = True

    @property
    def identity(self) -> Identity:
        """What must agree when a position is restored."""
        return self._identity

    @property
    def takes_seed(self) -> bool:
        """Whether neither the reader nor this loader was given a seed."""
        return self._takes_seed

    def reseed(self, seed: int) -> None:
        """Use the order and the randomness of ``seed`` from the next ``open`` on."""
        self._seed, self._identity = seed, replace(self._identity, seed=seed)

    @property
    def layout(self) -> Layout:
        """How the data is spread over ranks now. DALI's threads do not count as workers."""
        return Layout(self._share.world, self._share.batch, 0, versions=_VERSIONS)

    @property
    def rank(self) -> int:
        """This process's rank among those that share the data."""
        return self._share.rank

    @property
    def origin(self) -> tuple[int, int]:
        """(epoch, place) at which a run without a saved position starts."""
        return self._source.origin

    def name_of(self, sample: int) -> str:
        """The path of ``sample``, relative to the reader's root."""
        return self._spec.files.name(sample)

    def __len__(self) -> int:
        """Batches in a whole epoch, the same on every rank."""
        return self.batches_left(0)

    def batches_left(self, start: int) -> int:
        """Batches from place ``start`` to the end of an epoch."""
        return self._share.batches(len(self._spec.files) - start)

    def order(self, epoch: int) -> Order:
        """The order of ``epoch``."""
        return self._spec.order(self._seed, epoch)

    def open(self, *, epoch: int, start: int, state: object = None) -> DALIDeliveries:
        """Let the pipeline prefetch from place ``start`` on. Hands out nothing yet."""
        self.close()
        self._require_usable()
        begin = BatchStart(self._seed, epoch, start)
        if self.batches_left(start):
            self._enter(begin)
        self._open = DALIDeliveries(self, begin, self.batches_left(start))
        return self._open

    def close(self) -> None:
        """Close the open epoch. The pipeline lives as long as its iterator."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def fetch(self, begin: BatchStart) -> tuple[Record, Any]:
        """The batch at ``begin``, compared with what the source produced for it."""
        self._require_usable()
        self._require_untouched()
        data = self._next_batch()
        record = self._source.take()
        if record.begin != begin:
            raise IterationStateError(
                f"the reader made the batch at {record.begin}, not at {begin}"
            )
        for key, tensor in data[0].items():
            if len(tensor) != len(record.ids):
                raise RuntimeError(
                    f"DALI delivered {len(tensor)} samples in {key!r} where the reader produced "
                    f"{len(record.ids)}: every sample must go through the pipeline once"
                )
        for key, name in self._direct.items():
            if not np.array_equal(data[0][key].numpy(), self._spec.output(name, record)):
                raise RuntimeError(
                    f"DALI delivered a different {name} in {key!r} than the reader produced"
                )
        return record, data

    def _require_usable(self) -> None:
        if self._source.owner is not self._ownership:
            raise IterationStateError(
                "a second DALILoader or CFIterator was made over this DALI iterator and owns it "
                "now: build one DALI iterator for each"
            )
        if self._has_stopped:
            raise IterationStateError(
                "the DALI pipeline has stopped at an earlier error, and cannot continue with "
                "exec_dynamic=False: build it again"
            )

    def _require_untouched(self) -> None:
        waiting = graph.num_prefetched(self._iterator, self._pipeline)
        if waiting != self._source.num_produced:
            raise IterationStateError(
                f"the DALI pipeline holds {waiting} batches, but {self._source.num_produced} were "
                "made and not handed out: does other code use the iterator? The next pass "
                "continues where this one was"
            )

    def _enter(self, begin: BatchStart) -> None:
        self._forget_handed_out()
        if self._source.front != begin:
            self._source.seek(begin)
            for _ in range(self._source.num_produced):
                self._drop()

    def _forget_handed_out(self) -> None:
        """Drop the records of batches that other code took from the iterator, or that failed."""
        waiting = graph.num_prefetched(self._iterator, self._pipeline)
        for _ in range(self._source.num_produced - waiting):
            self._source.take()

    def _drop(self) -> None:
        """Discard a batch. Nobody needs it, so an error while it was made does not matter."""
        try:
            next(self._iterator)
        except RuntimeError as error:
            self._has_stopped = not self._pipeline.exec_dynamic
            if self._has_stopped:
                add_note(
                    error,
                    "in a batch that was prefetched and is not needed; but with "
                    "exec_dynamic=False the pipeline cannot continue: build it again",
                )
                raise
            logger.info("a prefetched batch that is not needed could not be made: %s", error)
        self._source.take()

    def _next_batch(self) -> Any:
        try:
            try:
                return next(self._iterator)
            except StopIteration:  # the source had ended an epoch before it became endless
                self._iterator.reset()
                return next(self._iterator)
        except RuntimeError as error:
            # The older executor (exec_dynamic=False) reports an error in any batch that it has
            # prefetched before it hands out this one, so each of those is a suspect.
            self._has_stopped = not self._pipeline.exec_dynamic
            suspects = self._source.ids_in_front(
                self._source.num_produced if self._has_stopped else 1
            )
            rebuild = " (with exec_dynamic=False, build the pipeline again)"
            advice = rebuild if self._has_stopped else ""
            names = ", ".join(map(self.name_of, suspects))
            add_note(error, f"DALI was reading one of: {names}{advice}")
            raise


class DALIDeliveries:
    """One opened epoch of a ``DALILoader``."""

    def __init__(self, loader: DALILoader, begin: BatchStart, num_batches: int) -> None:
        self._loader: DALILoader | None = loader
        self._begin, self._left = begin, num_batches

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        if self._loader is None or not self._left:
            raise StopIteration
        record, data = self._loader.fetch(self._begin)
        self._begin, self._left = self._begin._replace(place=record.end), self._left - 1
        return Delivery(data, record.end, record.ids, record.weights)

    def close(self) -> None:
        """Hand out nothing more. Prefetched batches stay in the pipeline."""
        self._loader = None
