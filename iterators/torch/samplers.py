"""Samplers in the shape of torch's, whose place in an epoch can be saved and entered again.

For loops that keep a plain torch ``DataLoader``. The caller says with ``advance`` what it has
used, so samples that the loader has only prefetched do not count. Progress is one global place
``c``: rank ``r`` of ``W`` takes places ``c + r, c + r + W, ...``, so ranks that advance by the
same counts hold the same state, and it may be loaded at another world size. Save rank 0's: when
an epoch's last places do not reach every rank, they reach rank 0, and the others cannot know
when they are used. Training process only.

Nothing is served twice to even out the ranks: ``ResumableDataLoader`` does that with a flagged
pad of weight 0. Here ranks differ by at most one unless ``drop_last``.
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
from iterators.order.environment import rank_and_world, sample_order
from iterators.order.epoch import IDS_AT_ONCE
from iterators.order.fingerprint import dataset_fingerprint
from iterators.order.position import Identity, Layout, Position

logger = logging.getLogger(__name__)

_Unit = TypeVar("_Unit")


class PlaceSampler(Sampler[_Unit]):
    """What all our samplers share; a unit (sample or batch) lies at each place."""

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
        """What lies at ``places`` of ``epoch``."""

    @property
    def identity(self) -> Identity:
        """What must agree when a state is loaded."""
        return self._identity

    @property
    def drop_last(self) -> bool:
        """Whether what does not reach every rank is left out."""
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
        """How much of this rank's share of the epoch is used: ``len(self)`` less what is left.

        After a restore at another world size, counted as if this one had served it all.
        """
        return len(self) - len(self._own())

    def __len__(self) -> int:
        """This rank's share of a whole epoch; a restored epoch is shorter, by ``progress``.

        torch's ``DataLoader`` derives its own length from it and does not mind the difference.
        """
        return len(range(self.rank, self._end(0), self.num_replicas))

    def __iter__(self) -> Iterator[_Unit]:
        """The rest of this rank's share of the epoch, from what has been advanced to."""
        places = self._own()
        if self._place and not places:
            logger.warning(
                "nothing of epoch %d is left for rank %d; set_epoch(%d) begins the next one",
                self._epoch,
                self.rank,
                self._epoch + 1,
            )
        return self._served(self._epoch, places)

    def advance(self, n: int = 1) -> None:
        """Count ``n`` more as used by this rank; every rank must do so between two saves.

        Raises ``IterationStateError`` past the end of the epoch; nothing changes then.
        """
        count, left = index(n), len(self._own())
        if count < 0:
            raise ValueError(f"advance counts forward, got {count}")
        if count > left:
            raise IterationStateError(
                f"advance({count}) passes the end of epoch {self._epoch}: {left} of {len(self)} "
                f"{self._unit} are left for rank {self.rank}. Call it once per batch, with what "
                "this rank used; set_epoch begins another epoch"
            )
        end = self._end(self._place)
        place = min(self._place + count * self.num_replicas, end)
        self._place = self._identity.n if place == end else place

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch``; keeps the progress if it is the current one.

        Raises ``IterationStateError`` when another epoch is half used, or for an epoch before
        the restored one.
        """
        epoch = index(epoch)
        if epoch < self._restored_epoch:
            raise IterationStateError(
                f"set_epoch({epoch}) would repeat an epoch: the loaded state stands at epoch "
                f"{self._restored_epoch}. Begin the loop with range(sampler.epoch, num_epochs)"
            )
        if epoch == self._epoch:
            return
        if self._place and self._own():
            raise IterationStateError(
                f"set_epoch({epoch}) would lose the rest of epoch {self._epoch}: {self.progress} "
                f"of {len(self)} {self._unit} are used. Serve the rest (after a restore, begin "
                "the loop with range(sampler.epoch, num_epochs)), or call reset_progress() first"
            )
        self._begin(epoch)

    @contextmanager
    def in_epoch(self, epoch: int) -> Iterator[None]:
        """Serve ``epoch`` in the block, then stand at the start of the next one.

        An exception keeps the progress, so its handler can save it. A block that is left early
        without one gives up the rest of the epoch.
        """
        self.set_epoch(epoch)
        yield
        self._begin(self._epoch + 1)

    def reset_progress(self) -> None:
        """Begin the current epoch again. After a whole epoch ``set_epoch`` alone is enough."""
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        """The place, JSON-able, under 1 kB. Its ledger is empty: nothing checks what was used.

        A ``CFIterator`` over the same data continues at that place too, and the other way round,
        but its report of that epoch is not ``exact``: its ledger misses what came before.
        """
        layout = Layout(self.num_replicas, self._batch)
        return Position(self._identity, self._epoch, self._place, layout=layout).to_dict()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue at a saved place, whatever the world size; iterators already open do not.

        Raises ``ResumeMismatchError`` for a state of other data or another order,
        ``CorruptPositionError`` for a damaged one. Nothing changes then.
        """
        position = Position.from_dict(state)
        self._require(position)
        self._begin(position.epoch)
        self._restored_epoch, self._place = position.epoch, position.position

    _batch = 0

    def _require(self, position: Position) -> None:
        position.require(self._identity)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._place = epoch, 0

    def _end(self, place: int) -> int:
        """Where an epoch ends that goes on from ``place`` at this world size."""
        n = self._identity.n
        return n - (n - place) % self.num_replicas if self.drop_last else n

    def _own(self) -> range:
        """This rank's places from the current one to the end."""
        return range(self._place + self.rank, self._end(self._place), self.num_replicas)


class ResumableDistributedSampler(PlaceSampler[int]):
    """torch's ``DistributedSampler``, resumable in mid-epoch and at another world size.

    ``num_replicas`` and ``rank`` are the process group's unless given. Every epoch has an order
    of its own, from ``seed`` in [0, 2**64) and the epoch alone (the dataset's own
    ``epoch_order(seed, epoch)`` if it has one); as with torch's sampler, ``torch.manual_seed``
    changes nothing. ``fingerprint`` names the data where ``dataset_fingerprint`` cannot tell::

        for epoch in range(sampler.epoch, num_epochs):
            with sampler.in_epoch(epoch):
                for inputs, labels in loader:
                    train(inputs, labels)
                    sampler.advance(len(inputs))
                    save(sampler.state_dict())  # rank 0's

    With ``drop_last=False`` every sample is used once and ranks differ by at most one sample,
    hence by at most one batch: under DDP wrap the loop in ``Join``, use ``drop_last=True``, or
    ``ResumableDataLoader``, which gives every rank the same number of batches. ``drop_last=True``
    leaves out what does not reach every rank, fewer than ``num_replicas`` samples of the epoch
    (or of the rest, from a restore on). In a loader given to ``CFIterator`` only the loader's own
    ``drop_last`` counts.
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
            dataset, Identity(order.algorithm, order.n, name, seed, tail), num_replicas, rank
        )
        self.shuffle = shuffle

    def _served(self, epoch: int, places: range) -> Iterator[int]:
        order = sample_order(self.dataset, self.seed, epoch, shuffle=self.shuffle)
        for start in range(0, len(places), IDS_AT_ONCE):
            yield from order.ids(places[start : start + IDS_AT_ONCE]).tolist()


class ResumableSampler(ResumableDistributedSampler):
    """The same without a split between ranks, for data that each rank has for itself.

    Save every rank's own state where their data differ.
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
