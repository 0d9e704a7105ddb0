"""The two contracts of the package: what ``CFIterator`` asks of a manager, and of a loader.

A manager (``checkfreq.CFManager``, or anyone's) saves positions and is told of boundaries; the
two packages meet nowhere else. An ``Adapter`` turns one kind of loader into deliveries that know
their place; a new kind of loader is a new adapter, and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from iterators.order.epoch import Int64, Order
from iterators.order.position import Identity, Layout, Position


class PositionSource(Protocol):
    """What is registered under a name: the iterator's half of the contract.

    A source may also have ``merged_state(states)``: the one position to load on every rank, from
    those that all ranks saved, in their order (or None: each its own). A manager of several ranks
    asks it at a restore; without the method each rank gets back what it saved, and a rank that
    was not there before gets rank 0's.
    """

    def state_dict(self) -> dict[str, Any]:
        """The position as of the last boundary, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue from a saved position; only before iteration began."""
        ...

    def finish(self) -> None:
        """Pass the boundary still pending after the last batch; called on a clean close."""
        ...


class Manager(Protocol):
    """What ``CFIterator`` asks of a checkpoint manager. All calls come from the training thread.

    A manager may also have ``finished``: True once the run is over, however far it came; the
    iterator that marks steps then hands out nothing.
    """

    @property
    def update_attempts(self) -> int:
        """How many weight updates were attempted since the run began."""
        ...

    @property
    def stopped(self) -> bool:
        """A stop notice arrived and the final checkpoint is durable."""
        ...

    def register_position(self, name: str, source: PositionSource, /) -> None:
        """Save ``source`` with every checkpoint; a restored position is applied at once."""
        ...

    def register_pacing(self, *, chk_freq: int | None, dynamic: bool | None) -> None:
        """Called only if the iterator was given either."""
        ...

    def step(self) -> None:
        """An iteration boundary; the position has already moved over it."""
        ...

    def end_epoch(self) -> None:
        """The boundary that closes an epoch, instead of ``step``."""
        ...

    def before_first_batch(self) -> None:
        """The loader is built and nothing was fetched: restored generators are set here.

        Called at the start of every pass until the first boundary of this process, unless
        batches of an earlier pass count for that boundary too; where ``epochs()`` begins with
        a whole epoch, once, before it hands out its number.
        """
        ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """One batch, and the place in the epoch that is behind it once it was used.

    ``ids`` are the samples in it and ``weights`` ``[N] float32`` says which count (0 for the pad
    of a rank that had nothing left; then places are samples); each is None when the loader
    cannot say. ``state`` is what the
    loader needs besides the place to continue behind this batch: JSON-able, not changed later.
    """

    data: Any
    end: int
    ids: Int64 | None = None
    weights: NDArray[np.float32] | None = None
    state: Any = None


class Deliveries(Protocol):
    """An opened epoch. ``close`` releases its workers; it may be called more than once."""

    def __iter__(self) -> Iterator[Delivery]: ...

    def __next__(self) -> Delivery: ...

    def close(self) -> None: ...


@runtime_checkable
class Adapter(Protocol):
    """One kind of loader, made resumable. Places are counted in ``identity.n`` units.

    Derive from it: what has a body here is a default.
    """

    @property
    def identity(self) -> Identity:
        """What must agree when a position is restored."""
        ...

    @property
    def layout(self) -> Layout:
        """What may differ."""
        ...

    @property
    def rank(self) -> int:
        """This process's rank among ``layout.world``; 0 when alone."""
        ...

    @property
    def origin(self) -> tuple[int, int]:
        """Epoch and place at which a run without a saved position begins."""
        return 0, 0

    def open(self, *, epoch: int, start: int, state: Any = None) -> Deliveries:
        """Build the loader's iterator at place ``start`` of ``epoch``; fetch nothing yet.

        ``state`` is that of the delivery which ended there, None at the origin. Must not draw
        from any global random generator.
        """
        ...

    @property
    def takes_seed(self) -> bool:
        """Whether the seed is a default, so that a restored position brings its own."""
        return False

    def reseed(self, seed: int) -> None:
        """Have order and randomness of ``seed`` from the next ``open`` on; if ``takes_seed``."""
        return

    def accept(self, position: Position) -> None:
        """Raise if this loader cannot continue at ``position``, whose identity fits.

        ``ResumeMismatchError`` for another layout where it matters, ``CorruptPositionError``
        for a damaged ``states``.
        """
        return

    def batches_left(self, start: int) -> int | None:
        """Batches from place ``start`` to the epoch's end; None if the loader cannot say."""
        ...

    def num_batches(self) -> int | None:
        """Batches in a whole epoch; an estimate will do."""
        return self.batches_left(0)

    def is_over(self, place: int) -> bool:
        """Whether the open epoch ends at ``place``, where its last delivery ended.

        Asked once that batch was used: a loader that cannot say may fetch the next one to see.
        """
        return self.batches_left(place) == 0

    def order(self, epoch: int) -> Order | None:
        """The epoch's order, for the ledger; None if the loader cannot say."""
        return None

    def name_of(self, sample: int) -> str:
        """What a person calls the sample with this id, a file's path for example."""
        return f"sample {sample}"

    def close(self) -> None:
        """Release persistent workers; the adapter can be opened again."""
        return
