"""What travels between the sampler and the loader's workers: requests out, deliveries back.

A request asks for one batch. The sampler draws requests for this rank's share of the global order;
the dataset wrapper seeds the random generators for each sample before it asks the user's dataset
for it, so a sample's augmentation depends on (seed, epoch, id) alone, whichever worker makes it;
the collate wrapper sends back which ids are in the batch. Sampler: training process only. The
two wrappers: any process, picklable if what they wrap is.
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


class BatchRequest(NamedTuple):
    """The samples of one batch, all of one epoch; ``weight`` is 0 for a pad, else 1."""

    epoch: int
    ids: list[int]
    weight: float


@dataclass(frozen=True, slots=True)
class Share:
    """How a global batch is split: rank ``r`` of ``world`` takes places ``c + r, c + r + W, ...``.

    ``batch`` is per rank. A tail shorter than a global batch is shared evenly ("short"; a rank
    with nothing left gets one pad of weight 0) or not served at all ("drop").
    """

    batch: int
    world: int = 1
    rank: int = 0
    tail: str = "short"

    @property
    def global_batch(self) -> int:
        """Places covered by one batch over all ranks."""
        return self.batch * self.world

    def batches(self, num_places: int) -> int:
        """How many global batches ``num_places`` places make."""
        whole, rest = divmod(num_places, self.global_batch)
        return whole + (1 if rest and self.tail == "short" else 0)

    def cut(self, order: Order, start: int) -> Iterator[tuple[int, list[int], float]]:
        """This rank's batches from place ``start``: where each begins over all ranks, ids, weight.

        Only an epoch's last batch can leave this rank idle: it gets that batch's first, weight 0.
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
    """A batch sampler over this rank's share, from any place of any epoch.

    ``seek`` says where the next ``iter`` starts; one object serves all epochs, since persistent
    workers never see a new one.
    """

    def __init__(self, order: Order, share: Share) -> None:
        self._share = share
        self.seek(order, epoch=0, start=0)

    def seek(self, order: Order, *, epoch: int, start: int) -> None:
        """Let the next ``iter`` begin at place ``start`` of ``order``, the order of ``epoch``."""
        self._order, self._epoch, self._start = order, epoch, start

    def __len__(self) -> int:
        return self._share.batches(self._order.n - self._start)

    def __iter__(self) -> Iterator[BatchRequest]:
        cut, epoch = self._share.cut(self._order, self._start), self._epoch
        return (BatchRequest(epoch, ids, weight) for _, ids, weight in cut)


@dataclass(frozen=True, slots=True)
class Seeding:
    """Which generators are seeded for each sample (or batch), and from what.

    Setting torch's CPU generator directly takes 2 us where ``torch.manual_seed``, which visits
    every device, takes 124 us (torch 2.13, 2 cores).
    """

    seed: int
    torch: bool = True
    python: bool = True
    numpy: bool = True

    def seed_for(self, *place: int) -> None:
        """Seed the chosen generators for one place, such as a sample of an epoch."""
        self.set(fold64(self.seed, *place))

    def keys(self, epoch: int, samples: Sequence[int]) -> list[int]:
        """What ``seed_for`` seeds with for each of ``samples``, in a fraction of the time."""
        return fold64_each(np.array(samples, dtype=np.uint64), self.seed, epoch)

    def set(self, key: int) -> None:
        """Seed the chosen generators with a key of 64 bits."""
        if self.torch:
            torch.default_generator.manual_seed(key & ((1 << 63) - 1))
        if self.python:
            random.seed(key)
        if self.numpy:
            np.random.seed(key & 0xFFFFFFFF)

    @contextmanager
    def caller_kept(self) -> Iterator[None]:
        """Give the caller its generators back, so loading in-process does not re-seed dropout."""
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
    """The samples of one batch, not yet collated, and their request."""

    request: BatchRequest
    samples: list[Any]


class Delivered(NamedTuple):
    """One collated batch on its way back; bytes, since pinning leaves them alone."""

    ids: bytes
    weights: bytes
    data: Any


class Wrapped:
    """Attributes are the wrapped dataset's, to read and to set.

    For ``worker_init_fn``s that go through ``get_worker_info().dataset``.
    """

    __slots__ = ("_cf_dataset",)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cf_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._cf_dataset, name, value)


class BatchRequestDataset(Wrapped):
    """The user's dataset, asked by request.

    A dataset whose own ``__getitems__`` fetches a whole batch is seeded once per batch, for its
    first sample: its order is exact at any layout, its augmentation at the same batch size and
    world.
    """

    __slots__ = ("_cf_by_batch", "_cf_seeding")

    def __init__(self, dataset: Any, seeding: Seeding) -> None:
        object.__setattr__(self, "_cf_dataset", dataset)
        object.__setattr__(self, "_cf_seeding", seeding)
        object.__setattr__(self, "_cf_by_batch", fetches_by_batch(dataset))

    def __len__(self) -> int:
        return len(self._cf_dataset)

    def __getitems__(self, request: BatchRequest) -> Fetched:
        fetch = self._by_batch if self._cf_by_batch else self._one_by_one
        return Fetched(request, fetch(request))

    def _one_by_one(self, request: BatchRequest) -> list[Any]:
        samples = []
        keys = self._cf_seeding.keys(request.epoch, request.ids)
        for sample, key in zip(request.ids, keys, strict=True):
            self._cf_seeding.set(key)
            samples.append(self._cf_dataset[sample])
        return samples

    def _by_batch(self, request: BatchRequest) -> list[Any]:
        self._cf_seeding.seed_for(request.epoch, request.ids[0])
        samples: list[Any] = self._cf_dataset.__getitems__(list(request.ids))
        if len(samples) != len(request.ids):
            raise ValueError(
                f"{type(self._cf_dataset).__name__}.__getitems__ returned {len(samples)} samples "
                f"for {len(request.ids)} ids; exactly-once needs one each"
            )
        return samples

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._cf_dataset, self._cf_seeding)


def fetches_by_batch(dataset: Any) -> bool:
    """Whether ``dataset`` really fetches whole batches; ``Subset`` only passes the question on."""
    own = getattr(type(dataset), "__getitems__", None)
    if own is not None and own is getattr(Subset, "__getitems__", None):
        return fetches_by_batch(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


@dataclass(frozen=True, slots=True)
class BatchRequestCollate:
    """The user's ``collate_fn``, with the ids beside its result.

    ``single``: the loader does not batch (``batch_size=None``), so one sample goes in.
    """

    collate: Callable[[Any], Any]
    single: bool = False

    def __call__(self, fetched: Fetched) -> Delivered:
        ids = np.array(fetched.request.ids, dtype=np.int64)
        weights = np.full(len(ids), fetched.request.weight, dtype=np.float32)
        samples = fetched.samples[0] if self.single else fetched.samples
        return Delivered(ids.tobytes(), weights.tobytes(), self.collate(samples))
