"""The two contracts of the package: with a checkpoint manager, and with a kind of loader.

A manager (``checkfreq.CFManager`` or any other) saves positions and is told about boundaries; the
two packages meet nowhere else. An ``Adapter`` turns one kind of loader into deliveries that know
their place. To support a new kind of loader, write an adapter; nothing else changes.
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
    """The iterator's half of the contract: an object that a manager saves under a name.

    A source may also have ``merged_state(states)``. It combines the states of all ranks, in rank
    order, into the one that every rank loads, or returns None if each rank loads its own. A manager
    of several ranks calls it at a restore. Without the method each rank gets its own state back,
    and a rank that did not exist before gets that of rank 0.
    """

    def state_dict(self) -> dict[str, Any]:
        """The position as of the last boundary, JSON-able."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue from a saved position. Only called before iteration begins."""
        ...

    def finish(self) -> None:
        """Pass the boundary that is pending after the last batch. Called on a clean close."""
        ...


class Manager(Protocol):
    """What ``CFIterator`` needs from a checkpoint manager. Called from the training thread only.

    A manager may also have

    - ``finished``: True once the run is over, at whatever step; the iterator that marks steps then
      serves nothing more;
    - ``on_delivery(name, delivery)``, or None: told of each batch before it is handed out;
    - ``no_update(num_batches, *, epoch_over)``: told after so many batches without an update, at
      the end of an epoch without one too;
    - ``holding_interrupts()``: a context, to be entered any number of times, within itself too, in
      which Ctrl-C is held back; it is raised at the end of the outermost;
    - ``reopens_after(error)``: whether a loader failed because its workers were told to stop like
      the run, which stops at a boundary that is still to come: the loader is opened again at the
      place of the next batch, and the loop goes on;
    - ``stops_after(error)``: whether a loader failed with ``error`` because the run is being
      stopped (the signal may have killed its workers); the manager has saved what it could.
    """

    @property
    def update_attempts(self) -> int:
        """How many weight updates were attempted since the run began."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether a stop notice has arrived and the final checkpoint is durable."""
        ...

    def register_position(self, name: str, source: PositionSource, /) -> None:
        """Save ``source`` with every checkpoint. Load a position already restored at once."""
        ...

    def register_pacing(self, *, chk_freq: int | None, dynamic: bool | None) -> None:
        """Set the interval between checkpoints. Called if the iterator was given either."""
        ...

    def step(self) -> None:
        """An iteration boundary was passed. The position has already moved over it."""
        ...

    def end_epoch(self) -> None:
        """The boundary that closes an epoch was passed; called instead of ``step``."""
        ...

    def before_first_batch(self) -> None:
        """Set the restored random generators: the loader is built, and no batch is fetched yet.

        Called at the start of every pass until the first boundary of this process, unless batches
        of an earlier pass count for that boundary too. If ``epochs()`` starts with a whole epoch,
        called once only, before the epoch's number is yielded.
        """
        ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """One batch, and the place in the epoch where the next one begins (``end``).

    ``ids``, ``[N] int64``, are its samples. ``weights``, ``[N] float32``, are 1, or 0 for a pad;
    a loader that gives weights counts its places in samples. Each is None if the loader does not
    know. ``state`` is what the loader needs besides the place to continue after this batch:
    JSON-able, and never changed later.
    """

    data: Any
    end: int
    ids: Int64 | None = None
    weights: NDArray[np.float32] | None = None
    state: Any = None


class Deliveries(Protocol):
    """An opened epoch. ``close`` releases its workers, and may be called more than once."""

    def __iter__(self) -> Iterator[Delivery]: ...

    def __next__(self) -> Delivery: ...

    def close(self) -> None: ...


@runtime_checkable
class Adapter(Protocol):
    """One kind of loader, made resumable. Subclass it; methods with a body here are defaults.

    ``open`` starts the loader at any place, each ``Delivery`` knows the place behind it, and
    ``CFIterator`` does the rest. A place is a number from 0 to ``identity.n``: of samples over all
    ranks, or of batches if the loader cannot count samples (``identity.n`` is then 0).
    ``iterators.testing.check_resumable`` tests an adapter.
    """

    @property
    def identity(self) -> Identity:
        """What must agree when a position is restored."""
        ...

    @property
    def layout(self) -> Layout:
        """What may differ when a position is restored."""
        ...

    @property
    def rank(self) -> int:
        """This process's rank among ``layout.world``; 0 when alone."""
        ...

    @property
    def origin(self) -> tuple[int, int]:
        """(epoch, place) at which a run without a saved position starts."""
        return 0, 0

    def open(self, *, epoch: int, start: int, state: Any = None) -> Deliveries:
        """Build the loader's iterator at place ``start`` of ``epoch``, but fetch nothing yet.

        ``state`` is that of the delivery that ended there; None at the origin. Must not draw from
        any global random generator: an uninterrupted run opens the epoch once, a resumed one again.
        """
        ...

    @property
    def takes_seed(self) -> bool:
        """Whether the seed is only a default, so that a restored position brings its own."""
        return False

    def reseed(self, seed: int) -> None:
        """Use the order and randomness of ``seed`` from the next ``open`` on, if ``takes_seed``."""
        return

    @property
    def takes_length(self) -> bool:
        """Whether each epoch has as many places as the data has when it begins."""
        return False

    def measure(self, n: int | None = None) -> None:
        """If ``takes_length``: the next ``open`` begins an epoch, or one of ``n`` places goes on.

        Called before each. ``identity.n`` and ``batches_left`` are those of that epoch from now on.
        """
        return

    def accept(self, position: Position) -> None:
        """Raise if this loader cannot continue at ``position``, whose identity is known to fit.

        ``ResumeMismatchError`` if the layout matters and differs, ``CorruptPositionError`` if the
        loader states in it are damaged. Must not change the adapter.
        """
        return

    def batches_left(self, start: int) -> int | None:
        """Batches from place ``start`` to the end of the epoch; None if the loader cannot say."""
        ...

    def num_batches(self) -> int | None:
        """Batches in a whole epoch, at least as an estimate; None if the loader cannot say."""
        return self.batches_left(0)

    def is_over(self, place: int) -> bool:
        """Whether the open epoch ends at ``place``, where the last delivery ended.

        Called after that batch was used. A loader that cannot say fetches the next batch, and keeps
        it for the next call.
        """
        return self.batches_left(place) == 0

    def twin(self) -> Adapter | None:
        """A second adapter over the same data, to open while this one is; None if there is none.

        It must share nothing with this one that an open epoch depends on.
        """
        return None

    def order(self, epoch: int) -> Order | None:
        """The order of the epoch, to check what was served; None if the loader has none."""
        return None

    def name_of(self, sample: int) -> str:
        """A name of the sample for messages, such as the path of its file."""
        return f"sample {sample}"

    def close(self) -> None:
        """Release persistent workers. The adapter can be opened again."""
        return
