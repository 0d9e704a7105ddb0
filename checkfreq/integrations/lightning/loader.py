"""The training loader, and the place in it: ours takes the place of Lightning's.

Lightning's own mid-epoch resume asks the loader for its state, whose sampler has usually drawn
ahead, and where the length is unknown its fetcher has too. So the trainer's source of training
loaders is replaced: it gives ``TrainLoader``, whose batches come from a ``CFIterator``. Lightning
fetches a batch when the update before it, its hooks and a validation behind it are done; there the
iterator passes its boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

from checkfreq.integrations.lightning.refusals import require_no_second_loader
from iterators.adapters import adapted
from iterators.cf_iterator import CFIterator
from iterators.protocol import Adapter


class TrainLoader:
    """What Lightning iterates over. It has no sampler and no state that Lightning could use.

    Lightning asks for an iterator before anything is restored, and may never use it. So nothing
    happens before the first batch is asked for. ``before_first`` is called then. It is its own
    iterator, since a copy of Lightning's loops copies that too: the copy serves the user's loader.
    """

    def __init__(self, loader: Any, *, seed: int | None) -> None:
        self.loader = loader
        self._seed = seed
        self._adapter: Adapter | None = None
        self._batches: CFIterator | None = None
        self._before_first: Callable[[], None] | None = None
        self._serving: Iterator[Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainLoader:
        return TrainLoader(self.loader, seed=self._seed)

    @property
    def dataset(self) -> Any:
        """The dataset of the user's loader."""
        return self.loader.dataset

    @property
    def adapter(self) -> Adapter:
        """The user's loader, made resumable; NotResumableError if it cannot be."""
        if self._adapter is None:
            self._adapter = adapted(self.loader, seed=self._seed, exact=True)
        return self._adapter

    def attach(self, batches: CFIterator, *, before_first: Callable[[], None]) -> None:
        """Serve these batches from now on."""
        self._batches, self._before_first = batches, before_first

    def detach(self) -> None:
        """Serve the user's loader as it is."""
        self._batches = self._before_first = None

    def __len__(self) -> int:
        length = self.adapter.num_batches()
        if length is None:
            raise TypeError("the training loader has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        self._serving = self._serve()
        return self

    def __next__(self) -> Any:
        if self._serving is None:
            self._serving = self._serve()
        return next(self._serving)

    def _serve(self) -> Generator[Any, None, None]:
        if self._batches is None:  # a search for a learning rate, say: no training to resume
            yield from self.loader
            return
        if self._before_first is not None:
            self._before_first()
            self._before_first = None
        for _, batch in self._batches.enumerate():
            yield batch


def source_of(trainer: Any, *, seed: int | None) -> LoaderSource:
    """Put our source of training loaders in place of the trainer's."""
    source = LoaderSource(trainer.fit_loop._data_source, seed=seed)
    trainer.fit_loop._data_source = source
    return source


class LoaderSource:
    """Lightning's ``_DataLoaderSource``, with a ``TrainLoader`` around the loader that it gives."""

    def __init__(self, source: Any, *, seed: int | None) -> None:
        self.source = source
        self._seed = seed
        self.given: TrainLoader | None = None

    def dataloader(self) -> Any:
        """What the user gave, with our loader in its place."""
        found = self.source.dataloader()
        combined = getattr(found, "flattened", None)  # of a CombinedLoader
        leaves = _leaves(found) if combined is None else combined
        require_no_second_loader(leaves)
        if not leaves:  # Lightning runs no step
            return found
        loader = leaves[0].loader if isinstance(leaves[0], TrainLoader) else leaves[0]
        self.given = TrainLoader(loader, seed=self._seed)
        if combined is None:
            return _replaced(found, self.given)
        found.flattened = [self.given]
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of a copy that is being made, and has no source yet
            raise AttributeError(name)
        return getattr(self.source, name)


def _leaves(found: Any) -> list[Any]:
    if isinstance(found, dict):
        return [leaf for one in found.values() for leaf in _leaves(one)]
    if isinstance(found, list | tuple):
        return [leaf for one in found for leaf in _leaves(one)]
    return [found]


def _replaced(found: Any, loader: TrainLoader) -> Any:
    """The same collection around ``loader``, its only leaf."""
    if isinstance(found, dict):
        return {name: _replaced(one, loader) for name, one in found.items() if _leaves(one)}
    if isinstance(found, list | tuple):
        return [_replaced(one, loader) for one in found if _leaves(one)]
    return loader


def fetch_exactly(trainer: Any, batches: CFIterator) -> None:
    """Have Lightning tell the last batch of a loader without a length by asking ours.

    Lightning's fetcher holds a batch back to find out, and so asks for a batch, which passes a
    boundary, before the update that uses the one before it.
    """
    fit_loop = trainer.fit_loop
    ahead = type(fit_loop._data_fetcher)

    def fetch(fetcher: Any) -> Any:
        batch = ahead.__next__(fetcher)
        fetcher.done = batches.is_last_batch
        return batch

    fetcher = type("ExactFetcher", (ahead,), {"__next__": fetch})(prefetch_batches=0)
    fetcher.setup(fit_loop._combined_loader)
    iter(fetcher)
    fit_loop._data_fetcher = fetcher
