"""A stream in shuffled order whose place can be saved: shuffled block by block.

A shuffle buffer that samples come out of one by one holds samples from anywhere before it, so its
state is its contents. A block is shuffled as a whole, so its state is where it began, its number
and how much of it was served; a restore reads one block again. Any process.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from iterators.errors import NotResumableError
from iterators.order.batch_requests import Seeding
from iterators.order.epoch import EpochOrder, fold64
from iterators.order.fingerprint import dataset_fingerprint
from iterators.torch.known_streams import require_exact, set_epoch
from iterators.torch.worker_batches import is_stateful


class ShuffledStream(IterableDataset[Any]):
    """The samples of ``dataset``, shuffled in blocks of ``buffer_size``; resumes exactly.

    ::

        stream = ShuffledStream(load_dataset(..., streaming=True), buffer_size=10_000)
        train_loader = CFIterator(DataLoader(stream, batch_size=32, num_workers=4))

    ``dataset`` is an iterable with ``state_dict`` and ``load_state_dict``, such as a streaming
    dataset of Hugging Face. Up to ``buffer_size`` samples are read, served in random order, then
    the next ones are read. A restore reads the samples of one block again, at most, whose random
    augmentation is the same. The order depends on the seed, the epoch and the loader's worker. Let
    the dataset change the order of its shards between epochs (``set_epoch``), since samples never
    leave their block.

    Arguments
        buffer_size: samples in a block, which are held in memory in each worker.
        seed: of the order.

    Raises ``NotResumableError`` for a dataset without state, or with one that does not cover it.
    """

    def __init__(self, dataset: Any, buffer_size: int = 1000, *, seed: int = 0) -> None:
        if buffer_size < 1:
            raise ValueError(f"buffer_size must be at least 1, got {buffer_size}")
        if not is_stateful(dataset):
            raise NotResumableError(
                f"{type(dataset).__name__} has no state_dict() and load_state_dict(), so a block "
                "of it cannot be read again without all that came before. Give it both, or use a "
                "map-style dataset"
            )
        require_exact(dataset)
        self._cf_source = dataset
        self._size, self._seed, self._epoch = buffer_size, seed, 0
        self._start: dict[str, Any] | None = None
        self._place: dict[str, Any] = {"block": 0, "served": 0, "source": None}

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter`` use the order of ``epoch``."""
        self._epoch = epoch

    def data_fingerprint(self) -> str:
        """What determines the order, besides the data."""
        return f"{dataset_fingerprint(self._cf_source)}:blocks({self._size}, {self._seed})"

    def state_dict(self) -> dict[str, Any]:
        """Where the block began, and how much of it was served."""
        return dict(self._place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter``, and only that one, continue there."""
        self._start = dict(state)

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, None
        self._place = start or {"block": 0, "served": 0, "source": None}
        # A copy: some datasets begin each iter at the state that was loaded once.
        source = copy.deepcopy(self._cf_source)
        set_epoch(source, self._epoch)
        if self._place["source"] is not None:
            source.load_state_dict(self._place["source"])
        yield from self._blocks(source)

    def _blocks(self, source: Any) -> Iterator[Any]:
        samples: Iterator[Any] | None = None
        while True:
            key = self._key(self._place["block"])
            seeding = Seeding(key)
            with seeding.caller_kept():
                seeding.seed_for(0)
                samples = iter(source) if samples is None else samples
                block = list(islice(samples, self._size))
            if not block:
                return
            after = source.state_dict()
            order = EpochOrder(len(block), key, 0).ids(range(len(block))).tolist()
            for index in order[self._place["served"] :]:
                self._place = {**self._place, "served": self._place["served"] + 1}
                yield block[index]
            self._place = {"block": self._place["block"] + 1, "served": 0, "source": after}

    def _key(self, block: int) -> int:
        info = get_worker_info()
        return fold64(self._seed, self._epoch, 0 if info is None else info.id, block)
