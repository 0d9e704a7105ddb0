"""Batch requests: what the sampler sends to the loader's workers, and what comes back.

A request names the samples of one batch. The sampler makes requests for this rank's share of the
global order. The dataset wrapper seeds the random generators before it asks the user's dataset for
a sample, so the augmentation of a sample depends on (seed, epoch, id) alone, whichever worker makes
it. The collate wrapper returns the batch together with its ids.

The sampler runs in the training process; the wrappers run in any process, and can be pickled if
the objects inside them can.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from iterators.order.epoch import IDS_AT_ONCE, Order, fold64, fold64_each
from iterators.order.generators import PrivateGenerators


class BatchRequest(NamedTuple):
    """The samples of one batch, all of the same epoch. ``weight`` is 0 for a pad, else 1."""

    epoch: int
    ids: list[int]
    weight: float


@dataclass(frozen=True, slots=True)
class Share:
    """How a global batch is split: rank ``r`` of ``W`` takes places ``c + r, c + r + W, ...``.

    ``batch`` is the batch size per rank. A tail that is shorter than a global batch is shared
    evenly ("short"; a rank that gets nothing of it serves one pad of weight 0) or not served
    ("drop"). Neighbouring places go to different ranks, so that the global batch is the same set
    of samples at any world size.
    """

    batch: int
    world: int = 1
    rank: int = 0
    tail: str = "short"

    @property
    def global_batch(self) -> int:
        """Places that one batch of all ranks covers."""
        return self.batch * self.world

    def batches(self, num_places: int) -> int:
        """Number of global batches in ``num_places`` places."""
        whole, rest = divmod(num_places, self.global_batch)
        return whole + (1 if rest and self.tail == "short" else 0)

    def cut(self, order: Order, start: int) -> Iterator[tuple[int, list[int], float]]:
        """This rank's batches from place ``start`` on, each as (global first place, ids, weight).

        Only the last batch of an epoch can have no sample for this rank. It then gets the first
        sample of that global batch as a pad, with weight 0, so that all ranks keep in step.
        """
        left, batch, step = self.batches(order.n - start), self.batch, self.global_batch
        at_once = max(1, IDS_AT_ONCE // batch)
        while left:
            taken = min(left, at_once)
            stop = min(start + taken * step, order.n)
            ids = order.ids(np.arange(start + self.rank, stop, self.world)).tolist()
            for index in range(taken):
                first = start + index * step
                if own := ids[index * batch : (index + 1) * batch]:
                    yield first, own, 1.0
                else:
                    yield first, order.ids(first).tolist(), 0.0
            start, left = stop, left - taken


class BatchRequestSampler:
    """A batch sampler over this rank's share that can start at any place of any epoch.

    ``seek`` sets where the next ``iter`` starts. One sampler serves all epochs, because a loader
    with persistent workers is built only once.
    """

    def __init__(self, order: Order, share: Share) -> None:
        self._share = share
        self.seek(order, epoch=0, start=0)

    def seek(self, order: Order, *, epoch: int, start: int) -> None:
        """Let the next ``iter`` start at place ``start`` of ``order``, the order of ``epoch``."""
        self._order, self._epoch, self._start = order, epoch, start

    def __len__(self) -> int:
        return self._share.batches(self._order.n - self._start)

    def __iter__(self) -> Iterator[BatchRequest]:
        cut, epoch = self._share.cut(self._order, self._start), self._epoch
        return (BatchRequest(epoch, ids, weight) for _, ids, weight in cut)


@dataclass(frozen=True, slots=True)
class Seeding:
    """Which global generators are seeded for each sample (or batch), and with which seed.

    Torch's CPU generator is seeded directly, which takes 2 us. ``torch.manual_seed`` visits every
    device and takes 124 us (torch 2.13, 2 cores).
    """

    seed: int
    torch: bool = True
    python: bool = True
    numpy: bool = True

    def seed_for(self, *place: int) -> None:
        """Seed the chosen generators for ``place``, for example (epoch, sample id)."""
        self.set(fold64(self.seed, *place))

    def keys(self, epoch: int, samples: Sequence[int]) -> list[int]:
        """The keys that ``seed_for(epoch, sample)`` would use, computed together: much faster."""
        return fold64_each(np.array(samples, dtype=np.uint64), self.seed, epoch)

    def set(self, key: int) -> None:
        """Seed the chosen generators with a 64-bit key, cut to what each of them accepts."""
        if self.torch:
            torch.default_generator.manual_seed(key & ((1 << 63) - 1))
        if self.python:
            random.seed(key)
        if self.numpy:
            np.random.seed(key & 0xFFFFFFFF)

    @contextmanager
    def caller_kept(self) -> Iterator[None]:
        """Restore the generators afterwards, so that loading in-process does not seed dropout."""
        torch_state = torch.default_generator.get_state() if self.torch else None
        python_state = random.getstate() if self.python else None
        numpy_state = np.random.get_state() if self.numpy else None
        try:
            yield
        finally:
            if torch_state is not None:
                torch.default_generator.set_state(torch_state)
            if python_state is not None:
                random.setstate(python_state)
            if numpy_state is not None:
                np.random.set_state(numpy_state)


class Fetched(NamedTuple):
    """The samples of one batch, not yet collated, with their request."""

    request: BatchRequest
    samples: list[Any]


class Delivered(NamedTuple):
    """One collated batch on its way back. Ids and weights are bytes: pinning does not copy them."""

    ids: bytes
    weights: bytes
    data: Any


class Wrapped:
    """Passes attributes through to the wrapped dataset, both reads and writes.

    A user's ``worker_init_fn`` often sets attributes of ``get_worker_info().dataset``.
    """

    __slots__ = ("_cf_dataset",)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cf_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cf_dataset, name, value)


class BatchRequestDataset(Wrapped):
    """The user's dataset, indexed by batch requests.

    For each sample the global generators are seeded, and private ones of the dataset or of
    ``collate``. They are looked for at the first request in each process. If the first samples
    have made others (in ``__getitem__``), these are seeded too, and the samples are made again.

    A dataset whose ``__getitems__`` fetches a whole batch is seeded once per batch, for the first
    sample. Its order is exact at any layout, but its augmentation only at the same batch size and
    world size.
    """

    __slots__ = ("_cf_by_batch", "_cf_collate", "_cf_private", "_cf_seeding")

    def __init__(self, dataset: Any, seeding: Seeding, collate: Any = None) -> None:
        object.__setattr__(self, "_cf_dataset", dataset)
        object.__setattr__(self, "_cf_seeding", seeding)
        object.__setattr__(self, "_cf_collate", collate)
        object.__setattr__(self, "_cf_by_batch", fetches_by_batch(dataset))
        object.__setattr__(self, "_cf_private", None)

    def __len__(self) -> int:
        return len(self._cf_dataset)

    def __getitems__(self, request: BatchRequest) -> Fetched:
        fetch = self._by_batch if self._cf_by_batch else self._one_by_one
        if self._cf_private is None:
            return Fetched(request, self._first(fetch, request))
        return Fetched(request, fetch(request))

    def _first(
        self, fetch: Callable[[BatchRequest], list[Any]], request: BatchRequest
    ) -> list[Any]:
        private = PrivateGenerators(
            self._cf_seeding, dataset=self._cf_dataset, collate_fn=self._cf_collate
        )
        private.look()
        object.__setattr__(self, "_cf_private", private)
        samples = fetch(request)
        return fetch(request) if private.look() else samples

    def _one_by_one(self, request: BatchRequest) -> list[Any]:
        samples = []
        keys = self._cf_seeding.keys(request.epoch, request.ids)
        for sample, key in zip(request.ids, keys, strict=True):
            self._cf_seeding.set(key)
            self._cf_private.set(key)
            samples.append(self._cf_dataset[sample])
        return samples

    def _by_batch(self, request: BatchRequest) -> list[Any]:
        key = fold64(self._cf_seeding.seed, request.epoch, request.ids[0])
        self._cf_seeding.set(key)
        self._cf_private.set(key)
        samples: list[Any] = self._cf_dataset.__getitems__(list(request.ids))
        if len(samples) != len(request.ids):
            raise ValueError(
                f"{type(self._cf_dataset).__name__}.__getitems__ returned {len(samples)} samples "
                f"for {len(request.ids)} ids: it must return one sample per id"
            )
        return samples

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._cf_dataset, self._cf_seeding, self._cf_collate)


def fetches_by_batch(dataset: Any) -> bool:
    """Whether ``dataset`` fetches whole batches. ``Subset`` does if the dataset inside it does."""
    own = getattr(type(dataset), "__getitems__", None)
    if own is not None and own is getattr(Subset, "__getitems__", None):
        return fetches_by_batch(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


@dataclass(frozen=True, slots=True)
class BatchRequestCollate:
    """The user's ``collate_fn``, returning the ids and weights beside its result.

    ``single``: the loader does not batch (``batch_size=None``), so ``collate_fn`` gets one sample.
    """

    collate: Callable[[Any], Any]
    single: bool = False

    def __call__(self, fetched: Fetched) -> Delivered:
        ids = np.array(fetched.request.ids, dtype=np.int64)
        weights = np.full(len(ids), fetched.request.weight, dtype=np.float32)
        samples = fetched.samples[0] if self.single else fetched.samples
        return Delivered(ids.tobytes(), weights.tobytes(), self.collate(samples))
