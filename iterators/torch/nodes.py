"""Nodes of ``torchdata.nodes``, resumed through the state that each of them keeps.

A place is the number of batches that this rank was served. Nodes keep their own order, so they are
resumed with the same number of ranks. Nodes whose state does not determine what follows are refused
by name. Training process only; one open epoch at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from iterators.errors import CorruptPositionError, NotResumableError, ResumeMismatchError
from iterators.order.batch_requests import Share
from iterators.order.environment import rank_and_world
from iterators.order.epoch import fold64
from iterators.order.generators import PrivateGenerators
from iterators.order.position import Identity, Layout, Position
from iterators.protocol import Delivery
from iterators.replay.lookahead import LookAhead
from iterators.torch.common import GENERATORS, VERSIONS, SeededAdapter, seeding_of
from iterators.torch.encoding import dumps, loads
from iterators.torch.known_streams import require_exact, seeds_of
from iterators.torch.worker_batches import is_stateful

if TYPE_CHECKING:
    from torchdata.nodes import BaseNode

logger = logging.getLogger(__name__)

#: Samplers that begin each epoch by its number alone, which ``SamplerWrapper`` saves.
_SAMPLERS = (DistributedSampler, SequentialSampler)


class ResumableNodeLoader(SeededAdapter):
    """A node of torchdata, or a ``Loader`` of one, that ``CFIterator`` can resume in mid-epoch.

    ::

        node = SamplerWrapper(DistributedSampler(dataset, 1, 0, shuffle=True, seed=7))
        node = Batcher(ParallelMapper(node, dataset.__getitem__, num_workers=4), 32)
        train_loader = CFIterator(Loader(Prefetcher(node, 2)), cf_manager=manager)

    **State.** The node's ``state_dict()`` is saved after each batch, without what it has
    prefetched, and given to its ``reset()``. It may hold plain values only. An epoch ends when the
    node does, and the next one begins with ``reset()``, as in a ``Loader``.

    **Randomness.** The global generators, and those that a ``Mapper``'s function keeps for itself,
    are seeded for each batch from (seed, epoch, rank, index), so what a ``Mapper`` draws is
    repeatable, as long as nothing between it and the loop prefetches. Threads and processes
    (``ParallelMapper``, ``Prefetcher``, ``PinMemory``) draw from generators that nobody seeds: let
    a sample's random numbers follow from the sample there. A warning says so, unless ``seeded`` is
    empty.

    Arguments
        seed: default: that of torch; rank 0's on all ranks.
        seeded: which global generators to seed, of "torch", "python" and "numpy". Empty if the
            nodes draw from none.
        rank, world: default: those of the process group. Ranks must be as many after a restore.
        fingerprint: a name for the data. Default: the kinds of the nodes.

    Raises ``NotResumableError`` for nodes that are not exact: ``in_order=False``, samplers that
    draw another order in each process, iterables whose state does not cover them.
    """

    def __init__(
        self,
        node: Any,
        *,
        seed: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        seeded: Collection[str] = GENERATORS,
        fingerprint: str | None = None,
    ) -> None:
        is_loader = isinstance(node, _torchdata().Loader)
        self._root: BaseNode[Any] = node.root if is_loader else node
        nodes = list(_nodes_of(self._root))
        for one in nodes:
            _require_exact_node(one)
        rank, world = rank_and_world(rank, world)
        super().__init__(seed, None, Share(1, world, rank, "short"))
        self._rank = rank
        self._makes_again = any(map(_makes_again, nodes))
        name = fingerprint or ">".join(type(one).__name__ for one in nodes)
        seeds = "".join(seeds_of(one.iterable) for one in nodes if _is_iterable(one))
        self._identity = Identity("torchdata-nodes-1", 0, name + seeds, self._seed)
        self._layout = Layout(world, 0, 0, versions=VERSIONS)
        self._seeding = seeding_of(self._seed, seeded)
        functions = [one.map_fn for one in nodes if hasattr(one, "map_fn")]
        self._private = PrivateGenerators(self._seeding, map_fn=functions)
        self._private.look()
        if seeded:
            _warn_of_threads(nodes)
        self._first: str | None = None
        self._open: NodeDeliveries | None = None

    def _rebuild(self) -> None:
        return

    @property
    def layout(self) -> Layout:
        """How many ranks share the data."""
        return self._layout

    @property
    def rank(self) -> int:
        """This process's rank among those that share the data."""
        return self._rank

    def batches_left(self, start: int) -> None:
        """Unknown until the node ends."""
        return

    def is_over(self, place: int) -> bool:
        """Whether the open epoch ends here. Fetches the next batch to find out, and keeps it."""
        return self._open is not None and self._open.is_over()

    def accept(self, position: Position) -> None:
        """Raise unless there is a state for each of as many ranks."""
        if not position.states:
            if position.position or position.epoch:
                raise CorruptPositionError("the saved position lacks the states of the nodes")
            return
        if len(position.states) != self._layout.world:
            raise ResumeMismatchError(
                "world",
                expected=len(position.states),
                found=self._layout.world,
                advice="Nodes split the data among the ranks themselves: resume with the same "
                "number of ranks, and a position merged from all of them.",
            )
        _decoded(position.states[self._rank])

    def open(self, *, epoch: int, start: int, state: Any = None) -> NodeDeliveries:
        """Set the node to its state at place ``start``, or to the beginning of the next epoch."""
        with self._seeding.caller_kept():
            self._seeding.seed_for(epoch, self._rank, 0)
            self._seek(None if state is None else _decoded(state), start)
        self._open = NodeDeliveries(self._next, epoch, start)
        return self._open

    def _seek(self, state: Any, start: int) -> None:
        if self._first is None:
            self._first = dumps(self._root.state_dict())
        began = time.monotonic()
        self._root.reset(loads(self._first) if state is None else state)
        if start and self._makes_again:
            logger.warning(
                "the nodes made %d batches again, which took %.1f s: one of them has no state of "
                "its own. This is exact only if it yields the same samples again",
                start,
                time.monotonic() - began,
            )
        if state is not None and not start:
            # The state is that of the end of the last epoch. A node starts the next one after it
            # has been asked for more than it has.
            next(self._root, None)
            self._root.reset()

    def _next(self, epoch: int, index: int) -> tuple[Any, str]:
        """The batch ``index`` and the node's state after it, encoded."""
        with self._seeding.caller_kept():
            self._seeding.seed_for(epoch, self._rank, index)
            self._private.set(fold64(self._seeding.seed, epoch, self._rank, index))
            batch = next(self._root)
            return batch, dumps(self._root.state_dict())


class NodeDeliveries:
    """One opened epoch."""

    def __init__(self, fetch: Any, epoch: int, start: int) -> None:
        self._fetch, self._epoch = fetch, epoch
        self._place = self._fetched = start
        self._batches = LookAhead(self._next_batch)

    def __iter__(self) -> Iterator[Delivery]:
        return self

    def __next__(self) -> Delivery:
        batch, state = next(self._batches)
        self._place += 1
        return Delivery(batch, self._place, state=state)

    def is_over(self) -> bool:
        """Whether no batch is left. Fetches the next one, which the next call serves."""
        return self._batches.is_over()

    def close(self) -> None:
        """Drop the batch that was fetched. The node stays as it is until the next epoch."""
        self._batches.close()

    def _next_batch(self) -> tuple[Any, str]:
        self._fetched += 1
        fetched: tuple[Any, str] = self._fetch(self._epoch, self._fetched)
        return fetched


def _torchdata() -> Any:
    """Its nodes, imported where there are some: the class can be imported without torchdata."""
    import torchdata.nodes

    return torchdata.nodes


def _decoded(state: Any) -> Any:
    try:
        return loads(state)
    except (TypeError, ValueError) as error:
        raise CorruptPositionError(f"the saved state of nodes is damaged ({error!r})") from error


def _nodes_of(root: BaseNode[Any]) -> Iterator[BaseNode[Any]]:
    """The node and all below it, each once."""
    kind = _torchdata().BaseNode
    left, seen = [root], set()
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        for value in vars(node).values():
            inner = value.values() if isinstance(value, dict) else [value]
            left.extend(one for one in inner if isinstance(one, kind))


def _is_iterable(node: Any) -> bool:
    return isinstance(node, _torchdata().IterableWrapper)


def _makes_again(node: Any) -> bool:
    """Whether the node is restored by running an iterable up to its place."""
    return _is_iterable(node) and not is_stateful(node.iterable)


def _warn_of_threads(nodes: list[BaseNode[Any]]) -> None:
    kinds = _torchdata()
    threaded = [one for one in nodes if isinstance(one, kinds.Prefetcher | kinds.PinMemory)]
    threaded += [one for one in nodes if isinstance(one, kinds.ParallelMapper) and one.num_workers]
    if threaded:
        logger.warning(
            "random numbers that %s draws, or a node before it, from the global generators are not "
            "the same after a restore: nobody seeds them in its threads. Let them follow from the "
            "sample. If none are drawn, say so: ResumableNodeLoader(node, seeded=())",
            type(threaded[0]).__name__,
        )


def _require_exact_node(node: Any) -> None:
    if getattr(node, "in_order", True) is False:
        raise NotResumableError(
            f"{type(node).__name__}(in_order=False) lets samples overtake one another, so its "
            "state does not tell which ones were served. Use in_order=True"
        )
    is_sampler = isinstance(node, _torchdata().SamplerWrapper)
    if is_sampler and type(node.sampler) not in _SAMPLERS:
        _require_own_sampler(node.sampler)
    if _is_iterable(node):
        require_exact(node.iterable)
        _require_reopened(node.iterable)


def _require_own_sampler(sampler: Any) -> None:
    """A sampler of the user's own is trusted; those of libraries are known not to be exact."""
    if type(sampler).__module__.split(".")[0] in ("torch", "torchdata", "iterators"):
        raise NotResumableError(
            f"{type(sampler).__name__} in a SamplerWrapper begins in another order, or at another "
            "place, in a restarted process: the node does not save what its order depends on. Use "
            "torch's DistributedSampler(dataset, num_replicas=1, rank=0, seed=...), or give the "
            "dataset to a DataLoader"
        )


def _require_reopened(iterable: Any) -> None:
    if type(iterable).__module__.split(".")[0] == "datasets":
        raise NotResumableError(
            f"{type(iterable).__name__} in an IterableWrapper begins each later epoch where it was "
            "restored, since the node never sets its epoch. Give it to a DataLoader, or wrap it: "
            "IterableWrapper(ShuffledStream(dataset, buffer_size=1))"
        )
