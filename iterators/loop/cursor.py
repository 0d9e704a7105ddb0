"""The cursor: how far batches were delivered, and how far the last boundary covers them.

``Cursor`` is the bookkeeping under ``CFIterator``. It is pure: it drives no loader and no manager.
``live`` moves when a batch is handed out and at the end of an epoch; ``commit`` moves ``saved`` up
to it, less the batches that a loop with a ``lookahead`` has fetched and not used. Only ``saved`` is
checkpointed, so a batch that was delivered but not yet used is served again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from iterators.order.epoch import Int64, Order, Permutation
from iterators.order.ledger import (
    AuditBitmap,
    Ledger,
    ids_of_places,
    ledger_of_places,
    ledger_of_range,
)
from iterators.order.position import Layout, Position
from iterators.protocol import Adapter, Delivery

#: Faults to describe in words: a repeated fault is clear from the first few. All ids are listed.
_MOST_NAMED = 20

_range_ledger = lru_cache(maxsize=8)(ledger_of_range)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the batches of an epoch were handed out.

    ``uncommitted`` counts the batches that no boundary covers yet. ``state`` is the loader's own
    (``Delivery.state``) after the last batch.
    """

    epoch: int = 0
    place: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    uncommitted: int = 0
    state: Any = None


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What one epoch served to this rank, compared with what it should have served.

    Attributes
        epoch: the number of the epoch, from 0.
        served: samples served, or places if the loader has no order.
        not_served: places at the end of the epoch that were not served, because the loop was left
            early or ``tail="drop"`` leaves them out.
        ledger: count, sum and xor of the hashed ids that were served.
        exact: whether the ledger equals that of this rank's places. The epoch was served exactly
            once if it does on every rank. None if the loader has no order, or if a restored
            position did not account for all samples before it.
        doubled, missing: ids of samples, with ``audit=True`` only.
        faults: the first doubled and missing samples with name and place, with ``audit=True`` only.
    """

    epoch: int
    served: int
    not_served: int
    ledger: Ledger
    exact: bool | None
    doubled: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    faults: tuple[str, ...] = ()


class Cursor:
    """The position of one iterator, whose loop fetches ``lookahead`` batches before it uses one.

    Training thread only.
    """

    live: Progress
    _base: Progress

    def __init__(self, adapter: Adapter, *, audit: bool = False, lookahead: int = 0) -> None:
        self._adapter = adapter
        #: ``live`` before each of the last ``lookahead`` batches.
        self._before_ahead: deque[Progress] = deque(maxlen=lookahead)
        self._layout: Layout = adapter.layout
        self._ranks = (adapter.rank,) if adapter.layout.world > 1 else ()
        self._audit = audit
        if audit and not isinstance(adapter.order(adapter.origin[0]), Permutation):
            raise ValueError("audit=True needs a permutation of samples that the loader knows")
        self._bitmap: AuditBitmap | None = None
        #: The batches since the last boundary, not in the audit yet, because ``rewind`` may take
        #: them back. For each, how many came before it since the boundary, and its samples.
        self._unmarked: list[tuple[int, Int64 | tuple[()]]] = []
        self.step = 0
        #: Where the last epoch was left that this run served in one process; 0 if at its end.
        self._left_at = 0
        self._begin(self._origin())
        self.saved = self._position(self.live, self.step)

    @property
    def used(self) -> Progress:
        """Where the batches begin that the loop has fetched ahead; ``live`` without any."""
        return self._before_ahead[0] if self._before_ahead else self.live

    def deliver(self, delivery: Delivery) -> None:
        """Move ``live`` over one batch."""
        counted = _counted(delivery)
        self._before_ahead.append(self.live)
        if self._audit:
            if self._bitmap is None:
                self._start_audit()
            self._unmarked.append((self.live.uncommitted, counted))
        self.live = replace(
            self.live,
            place=delivery.end,
            ledger=self.live.ledger + Ledger.of(counted),
            uncommitted=self.live.uncommitted + 1,
            state=delivery.state,
        )

    def commit(self, *, drained: bool = False) -> Progress:
        """Pass a boundary, and return where it is: ``saved`` catches up with ``used``.

        ``drained``: the batches that were fetched ahead are used too, since no more came.
        """
        if drained:
            self._before_ahead.clear()
        self.step += 1
        used, num_ahead = self.used, len(self._before_ahead)
        self._mark(self.live.uncommitted - num_ahead)
        self.live = replace(self.live, uncommitted=num_ahead)
        self.saved = self._position(used, self.step)
        return replace(used, uncommitted=0) if num_ahead else self.live

    def end_epoch(self, *, was_left: bool = False) -> EpochReport:
        """Move ``live`` to the start of the next epoch. ``was_left``: the loop left this one."""
        self._mark(self.live.uncommitted)
        report, live = self._report(), self.live
        if not self._base.place:
            self._left_at = live.place if was_left else 0
        self._begin(Progress(live.epoch + 1, uncommitted=live.uncommitted, state=live.state))
        return report

    def rewind(self, to: Progress) -> None:
        """Take back deliveries since ``to``, all of one epoch: they will be served again."""
        self.live = to
        self._before_ahead.clear()
        self._unmarked = [one for one in self._unmarked if one[0] < to.uncommitted]

    def take_back_ahead(self) -> None:
        """Take back what was fetched ahead of the last update, as nobody holds it any more."""
        if num_ahead := len(self._before_ahead):
            self.rewind(replace(self.used, uncommitted=self.live.uncommitted - num_ahead))

    def load(self, position: Position) -> None:
        """Continue from a restored position.

        Every rank loads the same global position, whose ledger covers all ranks. Only rank 0 keeps
        it: the ledgers of all ranks are added when their positions are merged again.
        """
        rank = self._adapter.rank
        ledger = position.ledger if rank == 0 else Ledger()
        state = position.states[rank] if rank < len(position.states) else None
        self.step, self._left_at = position.step, position.left_at
        self._before_ahead.clear()
        self._begin(Progress(position.epoch, position.position, ledger, state=state))
        self._knows_before = rank > 0 or ledger.count == position.position
        self.saved = self._position(self.live, self.step)

    def position_used(self) -> Position:
        """The position that a boundary passed now would save."""
        return self._position(self.used, self._next_step())

    def position_after_epoch(self) -> Position:
        """The position that a boundary passed now would save if the epoch ends here."""
        after = Progress(self.live.epoch + 1, state=self.live.state)
        return self._position(after, self._next_step())

    def _next_step(self) -> int:
        return self.step + (self.live.uncommitted > len(self._before_ahead))

    def _origin(self) -> Progress:
        epoch, place = self._adapter.origin
        order = self._adapter.order(epoch) if place and self._adapter.rank == 0 else None
        return Progress(epoch, place, Ledger() if order is None else expected_ledger(order, place))

    def _begin(self, at: Progress) -> None:
        """Start to serve at ``at``: from here on, this rank's places are evenly spaced."""
        self._base = self.live = at
        self._knows_before = True
        self._bitmap = None

    def _position(self, at: Progress, step: int) -> Position:
        return Position(
            self._adapter.identity,
            at.epoch,
            at.place,
            step,
            at.ledger,
            self._layout,
            states=() if at.state is None else (at.state,),
            ranks=self._ranks,
            left_at=self._left_at,
        )

    def _report(self) -> EpochReport:
        live, order = self.live, self._adapter.order(self.live.epoch)
        doubled, missing = self._audited()
        return EpochReport(
            live.epoch,
            live.place if order is None else live.ledger.count,
            max(0, self._adapter.identity.n - live.place),
            live.ledger,
            None if order is None else self._exact(order),
            doubled,
            missing,
            (*self._named("doubled", doubled), *self._named("missing", missing)),
        )

    def _exact(self, order: Order) -> bool | None:
        """Whether this rank's ledger is that of its places since ``_base``.

        Rank 0 also checks the ledger of everything before, which it alone has (see ``load``).
        """
        base, live, world = self._base, self.live, self._layout.world
        if world == 1 and self._knows_before:
            return live.ledger == expected_ledger(order, live.place)
        own = ledger_of_places(order, base.place + self._adapter.rank, live.place, world)
        if live.ledger - base.ledger != own:
            return False
        if not self._knows_before:
            return None
        return self._adapter.rank > 0 or base.ledger == expected_ledger(order, base.place)

    def _start_audit(self) -> None:
        """A fresh bitmap, in which the places before a restored position count as served."""
        order = self._adapter.order(self.live.epoch)
        assert order is not None, "checked at the beginning"
        self._bitmap, self._unmarked = AuditBitmap(order.n), []
        for ids in ids_of_places(order, 0, self._base.place):
            self._bitmap.mark(ids)

    def _mark(self, count: int) -> None:
        """Enter the first ``count`` uncommitted batches into the audit: they are final now."""
        for number, ids in self._unmarked:
            if self._bitmap is not None and number < count:
                self._bitmap.mark(ids)
        self._unmarked = [(one - count, ids) for one, ids in self._unmarked if one >= count]

    def _own_ids(self, order: Order, stop: int) -> Iterator[Int64]:
        start = self._base.place + self._adapter.rank
        return ids_of_places(order, start, stop, self._layout.world)

    def _audited(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(samples served more than once, samples of this rank's places that were not served)."""
        order = self._adapter.order(self.live.epoch)
        if self._bitmap is None or order is None:
            return (), ()
        missing = [self._bitmap.missing(ids) for ids in self._own_ids(order, self.live.place)]
        lacking = np.sort(np.concatenate(missing)) if missing else ()
        return tuple(self._bitmap.doubled()), tuple(int(one) for one in lacking)

    def _named(self, what: str, samples: tuple[int, ...]) -> list[str]:
        order = self._adapter.order(self.live.epoch)
        if not samples or not isinstance(order, Permutation):
            return []
        samples = samples[:_MOST_NAMED]
        places = order.positions(samples).tolist()
        return [
            f"{what}: {self._adapter.name_of(one)} (id {one}), place {place} of epoch "
            f"{self.live.epoch}"
            for one, place in zip(samples, places, strict=True)
        ]


def expected_ledger(order: Order, place: int) -> Ledger:
    """The ledger of the first ``place`` samples of ``order``.

    In the second half of an epoch the rest is subtracted from the whole, which is less to compute.
    """
    if not isinstance(order, Permutation) or place <= order.n // 2:
        return ledger_of_places(order, 0, place)
    return _range_ledger(order.n) - ledger_of_places(order, place, order.n)


def _counted(delivery: Delivery) -> Int64 | tuple[()]:
    """The samples of a batch without pads."""
    if delivery.ids is None or delivery.weights is None:
        return () if delivery.ids is None else delivery.ids
    return delivery.ids if delivery.weights.all() else delivery.ids[delivery.weights > 0]
