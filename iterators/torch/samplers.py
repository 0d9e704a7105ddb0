"""Drop-in replacements for torch's samplers that can be saved and restored in mid-epoch.

For loops that keep a plain torch ``DataLoader``. The loop reports with ``advance`` what it has
used, so samples that the loader has only prefetched do not count. Progress is one global place
``c``: rank ``r`` of ``W`` takes places ``c + r, c + r + W, ...``. Ranks that advance by the same
counts therefore have the same state, and it can be loaded at a different world size. Save the state
of rank 0: if the last places of an epoch do not reach every rank, they reach rank 0, and the other
ranks cannot tell when they were used. Training process only.

No sample is served twice to even out the ranks, as torch's sampler does; without ``drop_last`` the
numbers of samples differ by at most one. (``ResumableDataLoader`` evens them out with a pad of
weight 0.)
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import index
from typing import Any, TypeVar

from torch.utils.data import Sampler

from iterators.errors import IterationStateError
from iterators.loop.restore_log import warn_of_other_samples
from iterators.order.contents import sample_digests
from iterators.order.environment import rank_and_world, sample_order
from iterators.order.epoch import IDS_AT_ONCE
from iterators.order.fingerprint import dataset_fingerprint
from iterators.order.position import Identity, Layout, Position

logger = logging.getLogger(__name__)

_Unit = TypeVar("_Unit")


class PlaceSampler(Sampler[_Unit]):
    """The common part of our samplers. There is a unit, a sample or a batch, at each place."""

    def __init__(
        self, dataset: Any, identity: Identity, num_replicas: int | None, rank: int | None
    ) -> None:
        self.rank, self.num_replicas = rank_and_world(rank, num_replicas)
        self.dataset = dataset
        self._identity = identity
        self._epoch = self._place = self._restored_epoch = 0
        if not self._end(0):
            raise ValueError(
                f"drop_last=True would serve nothing: {identity.n} {self._unit} do not reach each "
                f"of {self.num_replicas} ranks"
            )

    _unit = "samples"

    @abstractmethod
    def _served(self, epoch: int, places: range) -> Iterator[_Unit]:
        """The units at ``places`` of ``epoch``."""

    @property
    def identity(self) -> Identity:
        """What must agree when a state is loaded."""
        return self._identity

    @property
    def drop_last(self) -> bool:
        """Whether units at the end of an epoch that do not reach every rank are left out."""
        return self._identity.tail == "drop"

    @property
    def seed(self) -> int:
        """The seed of every epoch's order."""
        return self._identity.seed

    @property
    def epoch(self) -> int:
        """The epoch being served, from 0."""
        return self._epoch

    @property
    def progress(self) -> int:
        """How much of this rank's share of the epoch was used: ``len(self)`` minus what is left.

        After a restore at a different world size: as if all had been served at the present one.
        """
        return len(self) - len(self._own())

    def __len__(self) -> int:
        """This rank's share of a whole epoch, of which a restored one serves ``progress`` less.

        torch's ``DataLoader`` derives its length from this, and accepts the difference.
        """
        return len(range(self.rank, self._end(0), self.num_replicas))

    def __iter__(self) -> Iterator[_Unit]:
        """The rest of this rank's share of the epoch, after what ``advance`` has counted."""
        places = self._own()
        if self._place and not places:
            logger.warning(
                "nothing of epoch %d is left for rank %d; start the next one with set_epoch(%d)",
                self._epoch,
                self.rank,
                self._epoch + 1,
            )
        return self._served(self._epoch, places)

    def advance(self, n: int = 1) -> None:
        """Count ``n`` more units as used by this rank. Every rank must do so between two saves.

        Raises ``IterationStateError`` past the end of the epoch, and changes nothing then.
        """
        count, left = index(n), len(self._own())
        if count < 0:
            raise ValueError(f"advance counts forward, got {count}")
        if count > left:
            raise IterationStateError(
                f"advance({count}) passes the end of epoch {self._epoch}: {left} of {len(self)} "
                f"{self._unit} are left for rank {self.rank}. Call it once per batch, with the "
                "number that this rank used; set_epoch starts a different epoch"
            )
        end = self._end(self._place)
        place = min(self._place + count * self.num_replicas, end)
        self._place = self._identity.n if place == end else place

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch``. Keeps the progress if it is the current epoch.

        Raises ``IterationStateError`` if a different epoch is partly used, or for an epoch before
        the restored one.
        """
        epoch = index(epoch)
        if epoch < self._restored_epoch:
            raise IterationStateError(
                f"set_epoch({epoch}) would repeat an epoch: the loaded state is in epoch "
                f"{self._restored_epoch}. Loop over range(sampler.epoch, num_epochs)"
            )
        if epoch == self._epoch:
            return
        if self._place and self._own():
            raise IterationStateError(
                f"set_epoch({epoch}) would skip the rest of epoch {self._epoch}: {self.progress} "
                f"of {len(self)} {self._unit} are used. Serve the rest (after a restore, loop over "
                "range(sampler.epoch, num_epochs)), or call reset_progress() first"
            )
        self._begin(epoch)

    @contextmanager
    def in_epoch(self, epoch: int) -> Iterator[None]:
        """Serve ``epoch`` in a ``with`` block, then move to the start of the next one.

        An exception keeps the progress, so that its handler can save it. Leaving the block early
        without an exception skips the rest of the epoch.
        """
        self.set_epoch(epoch)
        yield
        self._begin(self._epoch + 1)

    def reset_progress(self) -> None:
        """Start the current epoch again. Not needed between epochs, where ``set_epoch`` will do."""
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        """The place in the epoch: JSON-able, below 1 kB.

        A ``CFIterator`` over the same data can load it, and a sampler can load a ``CFIterator``'s
        state. But a sampler does not see which samples were used and saves an empty ledger, so the
        report of a ``CFIterator`` on that epoch cannot be ``exact``.
        """
        layout = Layout(self.num_replicas, self._batch)
        return Position(self._identity, self._epoch, self._place, layout=layout).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue at a saved place, at any world size. Iterators already made are not affected.

        Raises ``ResumeMismatchError`` if the state belongs to other data or a different order, and
        ``CorruptPositionError`` if it is damaged. The sampler does not change then.
        """
        position = Position.from_dict(state)
        self._require(position)
        self._begin(position.epoch)
        self._restored_epoch, self._place = position.epoch, position.position

    _batch = 0

    def _require(self, position: Position) -> None:
        position.require(self._identity)
        warn_of_other_samples(position.identity.samples, self._identity.samples)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._place = epoch, 0

    def _end(self, place: int) -> int:
        """The end of an epoch that is continued from ``place`` at this world size."""
        n = self._identity.n
        return n - (n - place) % self.num_replicas if self.drop_last else n

    def _own(self) -> range:
        """This rank's places from the current one to the end."""
        return range(self._place + self.rank, self._end(self._place), self.num_replicas)


class ResumableDistributedSampler(PlaceSampler[int]):
    """torch's ``DistributedSampler``, resumable in mid-epoch and at a different world size.

    ::

        sampler = ResumableDistributedSampler(dataset)
        loader = DataLoader(dataset, 64, sampler=sampler, num_workers=8)
        for epoch in range(sampler.epoch, num_epochs):
            with sampler.in_epoch(epoch):
                for inputs, labels in loader:
                    train(inputs, labels)
                    sampler.advance(len(inputs))
                    save(sampler.state_dict())  # rank 0's

    The order of an epoch depends on (``seed``, epoch) alone, or is the dataset's own
    ``epoch_order(seed, epoch)`` if it has one. As with torch's sampler, ``torch.manual_seed`` does
    not change it.

    With ``drop_last=False`` every sample is used once. The ranks may then differ by one sample,
    and so by one batch: under DistributedDataParallel wrap the loop in ``Join``, or use
    ``drop_last=True`` or ``ResumableDataLoader``, which serves the same number of batches to every
    rank.

    Arguments
        num_replicas, rank: default: world size and rank of the process group.
        seed: an integer in [0, 2**64).
        drop_last: leave out the samples at the end of an epoch (or, after a restore, of its rest)
            that do not reach every rank, fewer than ``num_replicas``. In a loader given to
            ``CFIterator``, only the loader's own ``drop_last`` counts.
        fingerprint: a name for the data, if the one derived from the dataset does not fit.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        fingerprint: str | None = None,
    ) -> None:
        order = sample_order(dataset, seed, 0, shuffle=shuffle)
        name = dataset_fingerprint(dataset, fingerprint)
        tail = "drop" if drop_last else "short"
        super().__init__(
            dataset,
            Identity(
                *(order.algorithm, order.n, name, seed, tail), sample_digests(dataset, fingerprint)
            ),
            num_replicas,
            rank,
        )
        self.shuffle = shuffle

    def _served(self, epoch: int, places: range) -> Iterator[int]:
        order = sample_order(self.dataset, self.seed, epoch, shuffle=self.shuffle)
        for start in range(0, len(places), IDS_AT_ONCE):
            yield from order.ids(places[start : start + IDS_AT_ONCE]).tolist()


class ResumableSampler(ResumableDistributedSampler):
    """``ResumableDistributedSampler`` for data that is not split among ranks.

    If every rank has its own data, save the state of every rank.
    """

    def __init__(
        self,
        dataset: Any,
        shuffle: bool = True,
        seed: int = 0,
        *,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(dataset, 1, 0, shuffle, seed, fingerprint=fingerprint)
