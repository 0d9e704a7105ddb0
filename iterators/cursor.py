"""Two places in the data: what was delivered, and what the last boundary covers.

``Cursor`` is the bookkeeping under ``CFIterator``, pure: no loader, no manager. ``live`` moves
when a batch is handed out and at the end of an epoch; ``commit`` moves ``saved`` up to it. Only
``saved`` is checkpointed, so a batch that was delivered but not yet used is served again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from iterators.ledger import AuditBitmap, Ledger, ledger_of_places, ledger_of_range
from iterators.order import Int64, ListedOrder, Order
from iterators.position import Identity, Layout, Position
from iterators.protocol import Adapter, Delivery

_BLOCK = 1 << 16
_range_ledger = lru_cache(maxsize=8)(ledger_of_range)


@dataclass(frozen=True, slots=True)
class Mark:
    """A live place. ``crossed``: an epoch ended since the last boundary."""

    epoch: int = 0
    place: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    uncommitted: int = 0
    crossed: bool = False


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What one epoch served to this rank, against what it should have.

    ``not_served`` counts places behind which the epoch was left (an early ``break``, or the tail
    under "drop"). ``exact``: the ledger equals that of the places before; None if the loader
    cannot say or several ranks share the data (add their ledgers, ``Position.merged``).
    ``doubled`` and ``missing`` name samples, only with ``audit=True``.
    """

    epoch: int
    served: int
    not_served: int
    ledger: Ledger
    exact: bool | None
    doubled: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()


class Cursor:
    """Where one iterator stands. Training thread only."""

    def __init__(self, adapter: Adapter, *, audit: bool = False) -> None:
        self._adapter = adapter
        self._identity: Identity = adapter.identity
        self._layout: Layout = adapter.layout
        self._audit = audit
        self._bitmap: AuditBitmap | None = None
        self.live = Mark()
        self.step = 0
        self.saved = Position(self._identity, layout=self._layout)
        if audit:
            self._start_audit()

    def deliver(self, delivery: Delivery) -> None:
        """Move ``live`` over one batch."""
        counted = _counted(delivery)
        if self._bitmap is not None:
            self._bitmap.mark(counted)
        self.live = replace(
            self.live,
            place=delivery.end,
            ledger=self.live.ledger + Ledger.of(counted),
            uncommitted=self.live.uncommitted + 1,
        )

    def commit(self) -> None:
        """Pass a boundary: ``saved`` catches up with ``live``."""
        self.step += 1
        self.live = replace(self.live, uncommitted=0, crossed=False)
        self.saved = self._position(self.live, self.step)

    def end_epoch(self) -> EpochReport:
        """Move ``live`` to the start of the next epoch."""
        report = self._report()
        self.live = Mark(self.live.epoch + 1, uncommitted=self.live.uncommitted, crossed=True)
        if self._audit:
            self._start_audit()
        return report

    def rewind(self, mark: Mark) -> None:
        """Take back deliveries that no boundary will ever cover."""
        self.live = mark
        if self._audit:
            self._start_audit()

    def load(self, position: Position) -> None:
        """Continue from a restored position. Only rank 0 keeps its ledger: ledgers add."""
        ledger = position.ledger if self._adapter.rank == 0 else Ledger()
        self.step = position.step
        self.rewind(Mark(position.epoch, position.position, ledger))
        self.saved = self._position(self.live, self.step)

    def position_after(self, *, epoch_over: bool) -> Position:
        """The position if a boundary were passed now."""
        step = self.step + (1 if self.live.uncommitted else 0)
        return self._position(Mark(self.live.epoch + 1) if epoch_over else self.live, step)

    def _position(self, mark: Mark, step: int) -> Position:
        return Position(self._identity, mark.epoch, mark.place, step, mark.ledger, self._layout)

    def _report(self) -> EpochReport:
        live, bitmap = self.live, self._bitmap
        order = self._adapter.order(live.epoch)
        exact = None
        if order is not None and self._layout.world == 1:
            exact = live.ledger == expected_ledger(order, live.place)
        return EpochReport(
            live.epoch,
            live.place if order is None else live.ledger.count,
            max(0, self._identity.n - live.place),
            live.ledger,
            exact,
            tuple(bitmap.doubled()) if bitmap else (),
            tuple(bitmap.missing().tolist()) if bitmap else (),
        )

    def _start_audit(self) -> None:
        """A fresh bitmap; after a restore, the places already served are taken as served."""
        order = self._adapter.order(self.live.epoch)
        if order is None or isinstance(order, ListedOrder) or self._layout.world != 1:
            raise ValueError("audit=True needs a permutation of known samples on one rank")
        self._bitmap = AuditBitmap(order.n)
        for start in range(0, self.live.place, _BLOCK):
            self._bitmap.mark(order.ids(np.arange(start, min(start + _BLOCK, self.live.place))))


def expected_ledger(order: Order, place: int) -> Ledger:
    """The ledger of the first ``place`` samples of ``order``, from the shorter side."""
    if isinstance(order, ListedOrder) or place <= order.n // 2:
        return ledger_of_places(order, 0, place)
    return _range_ledger(order.n) - ledger_of_places(order, place, order.n)


def _counted(delivery: Delivery) -> Int64 | tuple[()]:
    """The samples of a batch that count: pads do not."""
    if delivery.ids is None or delivery.weights is None:
        return () if delivery.ids is None else delivery.ids
    return delivery.ids if delivery.weights.all() else delivery.ids[delivery.weights > 0]
