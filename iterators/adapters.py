"""Chooses the adapter for a loader. A new kind of loader is one more entry in ``ADAPTERS``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from iterators.errors import NotResumableError
from iterators.protocol import Adapter
from iterators.replay.adapter import ReplayAdapter

logger = logging.getLogger(__name__)


def _torch_adapter(loader: Any, seed: int | None) -> Adapter | None:
    """An adapter for a torch loader. Does not import torch: such a loader implies that it is."""
    if "torch.utils.data" not in sys.modules:
        return None
    from torch.utils.data import DataLoader, IterableDataset

    from iterators.order.environment import indexed_source
    from iterators.torch.iterable import ResumableIterableLoader
    from iterators.torch.loader import ResumableDataLoader

    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.dataset, IterableDataset) and indexed_source(loader.dataset) is None:
        return ResumableIterableLoader.like(loader, seed=seed)
    return ResumableDataLoader.like(loader, seed=seed)


def _node_adapter(loader: Any, seed: int | None) -> Adapter | None:
    """An adapter for a node of torchdata, or for a loader of one. Does not import torchdata."""
    if "torchdata.nodes" not in sys.modules:
        return None
    from torchdata.nodes import BaseNode, Loader

    from iterators.torch.nodes import ResumableNodeLoader

    return ResumableNodeLoader(loader, seed=seed) if isinstance(loader, BaseNode | Loader) else None


def _dali_adapter(loader: Any, seed: int | None) -> Adapter | None:
    """An adapter for an iterator of DALI's torch plugin. Does not import DALI either."""
    if "nvidia.dali.plugin.pytorch" not in sys.modules:
        return None
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    from iterators.dali.indexed import DALILoader

    return DALILoader(loader, seed=seed) if isinstance(loader, DALIGenericIterator) else None


#: Each function knows one kind of loader. It returns an adapter for it, returns None for any other
#: kind, and raises ``NotResumableError`` for a loader of its kind that it cannot resume.
ADAPTERS: tuple[Callable[[Any, int | None], Adapter | None], ...] = (
    _torch_adapter,
    _node_adapter,
    _dali_adapter,
)


def adapted(loader: Iterable[Any] | Adapter, *, seed: int | None, exact: bool) -> Adapter:
    """``loader`` as an adapter.

    A loader that already is an adapter gets ``seed`` if it has none of its own; ``ValueError`` if
    the two differ. A loader that cannot be resumed exactly is refused (``NotResumableError``), or
    replayed if not ``exact``.
    """
    if isinstance(loader, Adapter):
        _give_seed(loader, seed)
        return loader
    try:
        for adapt in ADAPTERS:
            adapter = adapt(loader, seed)
            if adapter is not None:
                return adapter
        raise NotResumableError(
            f"{type(loader).__name__} is not a loader whose place can be saved. Use a torch "
            "DataLoader, a DALI iterator over iterators.dali.FileReader, or exact=False to resume "
            "by loading all batches up to the place again"
        )
    except NotResumableError as reason:
        if exact:
            raise
        logger.warning("resuming by replay (exact=False): %s", reason)
        return ReplayAdapter(loader, seed=seed or 0)


def _give_seed(loader: Adapter, seed: int | None) -> None:
    if seed is None or seed == loader.identity.seed:
        return
    if not loader.takes_seed:
        raise ValueError(f"seed is {seed} here and {loader.identity.seed} in the loader")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must lie in [0, 2**64), got {seed}")
    loader.reseed(seed)
