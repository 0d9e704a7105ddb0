"""The order of torch's samplers that have no formula: their indices are drawn again.

``torch.multinomial`` and the like cannot be entered in the middle, so an epoch that is entered at a
place draws the indices before it too, without loading a sample. They depend on (seed, epoch) alone,
and on the release of torch. Training process only.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from iterators.order.epoch import IDS_AT_ONCE, Int64, fold64

logger = logging.getLogger(__name__)

#: Samplers that draw with the generator they were given, and with nothing else.
_KINDS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
#: What the drawn indices depend on, where a sampler has it.
_DRAWN_FROM = ("weights", "indices", "replacement")


def can_be_drawn(sampler: object) -> bool:
    """Whether the indices of ``sampler``, one of torch's or a subclass, can be drawn again."""
    draws = getattr(type(sampler), "__iter__", None)
    return any(isinstance(sampler, kind) and draws is kind.__iter__ for kind in _KINDS)


class DrawnOrder:
    """The order that ``sampler`` gives an epoch: ids in ``[0, num_samples)``, some several times.

    Draws only as far as it is asked and keeps what it drew last, so ids of increasing places are
    fast. ``ids`` of a place far before the last one draws from the start again.
    """

    def __init__(self, sampler: Any, num_samples: int, seed: int, epoch: int) -> None:
        self.n, self._num_samples = len(sampler), num_samples
        self._sampler = copy.copy(sampler)
        for name in _DRAWN_FROM:
            if isinstance(found := getattr(sampler, name, None), torch.Tensor):
                setattr(self._sampler, name, found.clone())
            elif isinstance(found, list):
                setattr(self._sampler, name, list(found))
        self._seed = fold64(seed, epoch) & ((1 << 63) - 1)
        self.algorithm = f"drawn-1:{type(sampler).__name__}:{_digest(self._sampler)}"
        self._restart()

    def _restart(self) -> None:
        device = getattr(getattr(self._sampler, "weights", None), "device", "cpu")
        self._sampler.generator = torch.Generator(device).manual_seed(self._seed)
        self._rest: Iterator[int] = iter(self._sampler)
        self._first, self._drawn = 0, np.empty(0, np.int64)

    def ids(self, positions: ArrayLike, /) -> Int64:
        """The samples at ``positions``, ``[N] int64``."""
        places = np.atleast_1d(np.asarray(positions, dtype=np.int64))
        if not places.size:
            return places
        low, high = int(places.min()), int(places.max())
        if low < 0 or high >= self.n:
            raise IndexError(f"expected places in [0, {self.n}), got {low} to {high}")
        if low < self._first:
            self._restart()
        while high >= self._first + len(self._drawn):
            self._draw(low)
        ids: Int64 = self._drawn[places - self._first]
        return ids

    def _draw(self, low: int) -> None:
        """Draw a block more. Of what is before ``low``, keep a block: a pad may come from there."""
        with torch.device("cpu"):  # of the generator, whatever torch.set_default_device says
            block = np.fromiter(islice(self._rest, IDS_AT_ONCE), np.int64)
        if not block.size or block.min() < 0 or block.max() >= self._num_samples:
            raise IndexError(
                f"{type(self._sampler).__name__} draws samples that a dataset of "
                f"{self._num_samples} does not have, or fewer than its length of {self.n}"
            )
        left_out = min(max(0, low - IDS_AT_ONCE - self._first), len(self._drawn))
        self._first += left_out
        self._drawn = np.concatenate([self._drawn[left_out:], block])


def drawing(sampler: Any, num_samples: int) -> Callable[[int, int], DrawnOrder]:
    """A function (seed, epoch) -> order. It warns once if the sampler has changed since."""
    first = _digest(sampler)

    @functools.cache
    def warn_of_change() -> None:
        logger.warning(
            "%s was changed after CFIterator took it (its weights or its indices): the order of "
            "this epoch follows from what it is now, so a run that is resumed must change it in "
            "the same way before its first batch",
            type(sampler).__name__,
        )

    def order(seed: int, epoch: int) -> DrawnOrder:
        if _digest(sampler) != first:
            warn_of_change()
        return DrawnOrder(sampler, num_samples, seed, epoch)

    return order


def _digest(sampler: Any) -> str:
    digest = blake2b(digest_size=8)
    for name in _DRAWN_FROM:
        found = getattr(sampler, name, "")
        if isinstance(found, torch.Tensor):
            found = found.detach().cpu().numpy()
        values = np.asarray(found)
        digest.update(values.tobytes() if values.dtype.kind != "O" else b"")
    digest.update(f"{len(sampler)}:{len(getattr(sampler, 'data_source', ()))}".encode())
    return digest.hexdigest()
