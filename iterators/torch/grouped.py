"""A batch sampler that never mixes groups, resumable like the samplers in ``samplers.py``.

The list of an epoch's batches is computed as a whole, from the order of the samples, when the epoch
is entered. While an epoch of ``n`` samples is served this takes a few times ``8 * n`` bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from iterators.errors import ResumeMismatchError
from iterators.order.contents import sample_digests
from iterators.order.environment import length_of, sample_order
from iterators.order.epoch import Int64, Permutation
from iterators.order.fingerprint import dataset_fingerprint
from iterators.order.position import Identity, Position
from iterators.torch.samplers import PlaceSampler


class ResumableGroupedBatchSampler(PlaceSampler[list[int]]):
    """A batch sampler whose batches never mix groups, such as aspect ratios or lengths.

    ::

        sampler = ResumableGroupedBatchSampler(dataset, group_ids, batch_size=8)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(sampler.epoch, num_epochs):
            with sampler.in_epoch(epoch):
                for inputs, labels in loader:
                    train(inputs, labels)
                    sampler.advance()  # one batch

    ``group_ids`` holds one integer per sample, ``[N]``. Progress is counted in batches of this
    rank. The batches of an epoch and their order depend on the data, ``batch_size``, ``seed`` and
    the epoch alone; the ranks take them in turn. A batch is served when its last sample is reached
    in the (shuffled) order of the samples. Short batches, at most one per group, come last.

    The ranks may differ by one batch, see ``ResumableDistributedSampler``. ``drop_last=True``
    leaves out short batches and, at the end, those that do not reach every rank. A state cannot be
    loaded with a different ``batch_size`` or ``drop_last``, which would form different batches.

    Raises ``ValueError`` unless there is one group id per sample, and for a dataset whose own
    ``epoch_order`` repeats samples or leaves some out.
    """

    _unit = "batches"

    def __init__(
        self,
        dataset: Any,
        group_ids: Sequence[int] | Int64,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        fingerprint: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self._num_samples = length_of(dataset)
        self._groups = _group_codes(group_ids, self._num_samples)
        self.batch_size = self._batch = batch_size
        self.shuffle = shuffle
        data = dataset_fingerprint(dataset, fingerprint)
        groups = blake2b(self._groups.astype("<i8").tobytes(), digest_size=8).hexdigest()
        order = sample_order(dataset, seed, 0, shuffle=shuffle)
        if not isinstance(order, Permutation) or order.n != self._num_samples:
            raise ValueError(
                f"{type(dataset).__name__}.epoch_order does not contain each sample exactly once, "
                "so its batches cannot be counted"
            )
        identity = Identity(
            f"grouped-1({order.algorithm})",
            _num_batches(self._groups, batch_size, drop_last),
            f"{data}:groups({groups})",
            seed,
            "drop" if drop_last else "short",
            sample_digests(dataset, fingerprint),
        )
        super().__init__(dataset, identity, num_replicas, rank)

    def _served(self, epoch: int, places: range) -> Iterator[list[int]]:
        order = sample_order(self.dataset, self.seed, epoch, shuffle=self.shuffle)
        ids = order.ids(range(self._num_samples))
        grouped, starts, stops = _cut(self._groups[ids], self.batch_size)
        for place in places:
            yield ids[grouped[starts[place] : stops[place]]].tolist()

    def _require(self, position: Position) -> None:
        """Compare these first: they would otherwise show as a different number of batches."""
        saved = position.identity
        if saved.algorithm == self._identity.algorithm:
            _require_equal("batch_size", position.layout.batch, self.batch_size)
            _require_equal("drop_last", saved.tail == "drop", self.drop_last)
        super()._require(position)


def _group_codes(group_ids: Sequence[int] | Int64, num_samples: int) -> Int64:
    """The groups renumbered from 0 without gaps, ``[num_samples] int64``."""
    given = np.asarray(group_ids)
    if given.shape != (num_samples,) or given.dtype.kind not in "iu":
        raise ValueError(
            f"group_ids must hold one integer for each of {num_samples} samples, got "
            f"{given.dtype} of shape {given.shape}"
        )
    return np.unique(given, return_inverse=True)[1].astype(np.int64)


def _num_batches(groups: Int64, batch_size: int, whole_only: bool) -> int:
    sizes = np.bincount(groups)
    return int((sizes // batch_size if whole_only else -(-sizes // batch_size)).sum())


def _cut(groups: Int64, batch_size: int) -> tuple[Int64, Int64, Int64]:
    """Cut places into batches of one group each. ``groups``: the group at each place, ``[N]``.

    Returns the places sorted by group, ``[N]``, and where in that list each batch starts and stops,
    ``[B]``: whole batches in the order of their last places, then the short ones in theirs.
    """
    grouped = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups)
    counts = -(-sizes // batch_size)
    group_stops = np.repeat(np.cumsum(sizes), counts)
    in_group = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = group_stops - np.repeat(sizes, counts) + in_group * batch_size
    stops = np.minimum(starts + batch_size, group_stops)
    short = stops - starts < batch_size
    order = np.lexsort((grouped[stops - 1], short))
    return grouped, starts[order], stops[order]


def _require_equal(name: str, expected: object, found: object) -> None:
    if expected != found:
        raise ResumeMismatchError(
            name,
            expected=expected,
            found=found,
            advice="It decides which samples form a batch: use the value of the interrupted run.",
        )
