"""``PassRunner``: hands out the batches of a pass, and passes the boundaries between them.

The order of events is what makes a resumed run exact, so it is all here, in ``_batches``:

1. the loader's iterator is built, then the restored random generators are set;
2. a batch is fetched and handed out; the cursor moves over it;
3. the loop comes back for the next batch: if an update was attempted, the boundary is passed
   *before* that batch is fetched, so that nothing the fetch draws belongs to the saved state;
4. the boundary behind an epoch's last batch waits until the epoch's tail (validation, a
   scheduler) has run, and is passed by the next loop. Where only the loader's end tells which
   batch is the last (an iterable dataset), the next one is fetched before the boundary after all.

Training thread only.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any

from iterators.errors import IterationStateError
from iterators.loop.ahead import AheadWatch
from iterators.loop.beside import end_passes_beside
from iterators.loop.boundaries import Boundaries
from iterators.loop.boundary_rule import BoundaryRule
from iterators.loop.counting import Counting
from iterators.loop.cursor import Cursor, EpochReport
from iterators.loop.last_update import LastUpdate
from iterators.loop.passes import Pass, PassState, Settlement
from iterators.loop.tails import TailWatch
from iterators.order.position import Position
from iterators.protocol import Adapter, Deliveries, Delivery

logger = logging.getLogger(__name__)

#: So many batches before the first update are told to the manager, which may know why.
_MANY_UNUSED = 50


class PassRunner:
    """The passes of one iterator. ``name`` is the iterator's, for the log.

    ``on_delivery`` is told of each batch before it is handed out, ``last_update`` and ``ahead`` of
    each that is about to be. ``batches_per_epoch`` is ``CFIterator``'s.
    """

    def __init__(
        self,
        name: str,
        adapter: Adapter,
        cursor: Cursor,
        *,
        rule: BoundaryRule,
        boundaries: Boundaries,
        on_delivery: Callable[[str, Delivery], None] | None = None,
        batches_per_epoch: int | None = None,
        last_update: LastUpdate | None = None,
        ahead: AheadWatch | None = None,
    ) -> None:
        self._on_delivery, self._batches_per_epoch = on_delivery, batches_per_epoch
        self._last_update, self._ahead = last_update, ahead
        self._name, self._adapter, self._cursor = name, adapter, cursor
        self._rule, self._boundaries = rule, boundaries
        self._running: weakref.ref[Generator[Any, None, None]] | None = None
        self.counting, self.tail = Counting(name), TailWatch(name)
        self.is_turning = False
        self.current = Pass(rule, cursor.live)
        self.last: Delivery | None = None
        self.last_num_samples: int | None = None
        self.last_report: EpochReport | None = None
        #: Where the batch handed out last begins, or the next one before any was.
        self._batch_start = cursor.live.place
        #: Whether the last pass was one of steps(), which has no epochs for its loop.
        self._is_stream = False

    def load(self, position: Position) -> None:
        """Continue from ``position``, as if nothing had been served."""
        self._cursor.load(position)
        self._batch_start = position.position
        self._running = None
        if self._last_update is not None:
            self._last_update.forget()
        self._boundaries.restart()
        self.current = Pass(self._rule, self._cursor.live)
        if position.position:
            left_at = 0 if self._batches_per_epoch else position.left_at
            self.counting.resumed(position.epoch, self.index, self._index_at(left_at))

    # What was handed out

    @property
    def index(self) -> int:
        """Index in its epoch of the batch handed out last."""
        return self._index_at(self._batch_start)

    def _index_at(self, place: int) -> int:
        """Index in its epoch of the batch that begins at ``place``."""
        whole, left = self._adapter.batches_left(0), self._adapter.batches_left(place)
        return place if whole is None or left is None else whole - left

    def is_over(self, place: int) -> bool:
        """Whether the open epoch ends at ``place``; see ``Adapter.is_over``."""
        return self._is_cut(place) or self._adapter.is_over(place)

    def _is_cut(self, place: int) -> bool:
        """Whether ``batches_per_epoch`` ends the epoch at ``place``."""
        most = self._batches_per_epoch
        return most is not None and self._index_at(place) >= most

    def _is_whole(self, place: int) -> bool:
        """Whether the epoch is known to end at ``place``, without a look at the next batch."""
        return self._is_cut(place) or self._adapter.batches_left(place) == 0

    @property
    def is_using_batch(self) -> bool:
        """Whether a batch handed out since the last boundary will count for the next one."""
        pending = self._pending
        if self.current.state is not PassState.EXHAUSTED:
            pending -= self._rule.lookahead
        return pending > 0 and self.current.settlement(self._pending) is not Settlement.TAKE_BACK

    @property
    def owes_boundary(self) -> bool:
        """Whether an update was attempted since the first batch that no boundary covers."""
        return self._pending > 0 and self._rule.updated_in_group()

    @property
    def has_trained(self) -> bool:
        """Whether a pass is open or over of which an update has used a batch."""
        is_there = self.current.state in (PassState.OPEN, PassState.EXHAUSTED, PassState.LEFT)
        return is_there and self.current.has_trained(self._pending)

    @property
    def is_in_epoch(self) -> bool:
        """Whether a pass has served batches of the epoch that is trained on, and it is not closed.

        After a restore its updates may all have come before this process.
        """
        state = self.current.state
        is_restored = state is PassState.EXHAUSTED and self.current.last_boundary.place > 0
        return state in (PassState.OPEN, PassState.PAUSED) or is_restored or self.has_trained

    @property
    def was_used(self) -> bool:
        """Whether a batch was used in this process, so that no position can be loaded any more."""
        return (
            self.current.state is PassState.EXHAUSTED
            or self._boundaries.num_passed > 0
            or self.current.has_trained(self._pending)
        )

    @property
    def _pending(self) -> int:
        """Batches handed out since the last boundary."""
        return self._cursor.live.uncommitted

    # One pass

    def start_pass(self, *, limit: int | None = None) -> Generator[Any, None, None]:
        """The batches of the epoch from the cursor on; up to ``limit`` boundaries in all.

        Settle the last pass first. Only a weak reference to the generator is kept: when a loop is
        left, Python has to collect it at once, which ends the loader's workers.
        """
        self._is_stream = limit is not None
        running = self._serve(limit)
        self._running = weakref.ref(running)
        return running

    def end(self) -> None:
        """End the pass for good, and those that a ``zip`` advances with it and a variable keeps."""
        running = self._running() if self._running else None
        if running is not None and self._boundaries.are_reported:
            end_passes_beside(running, PassRunner._serve.__code__)
        self.reset()

    def reset(self) -> None:
        """Close the generator of a pass that is still open, unless we are called from inside it."""
        running = self._running() if self._running else None
        if running is not None and getgeneratorstate(running) != GEN_RUNNING:
            running.close()

    def _serve(self, limit: int | None) -> Generator[Any, None, None]:
        if self._boundaries.is_over:
            return
        current = self.current = Pass.opened(self._rule, self._cursor.live)
        uninterrupted = self._boundaries.uninterrupted()
        if self._ahead is not None:
            self._ahead.starts_pass()
        end = PassState.SETTLED
        try:
            end = yield from self._batches(limit, uninterrupted)
            if end is PassState.EXHAUSTED and limit is None and self._boundaries.are_reported:
                self.tail.begins()  # steps() has no tails
        except GeneratorExit:  # break, an error in the loop's body, or reset()
            end = self._state_when_left(limit)
            raise
        except BaseException:
            # The loader failed, or Ctrl-C while it fetched. The boundary of an update that was
            # attempted before that is still to be passed.
            is_pending = self._rule.lookahead or self._rule.is_due(self._pending)
            end = PassState.PAUSED if is_pending else PassState.SETTLED
            raise
        finally:
            with uninterrupted:
                current.end(end)

    def _batches(
        self, limit: int | None, uninterrupted: AbstractContextManager[None]
    ) -> Generator[Any, None, PassState]:
        """``uninterrupted`` surrounds all but the fetch, and the loop's own code."""
        live = self._cursor.live
        try:
            with uninterrupted:
                deliveries = self._open()
        except Exception as error:
            if not self._boundaries.stops_after(error):
                raise
            return PassState.SETTLED
        try:
            self._boundaries.set_generators(pending=self._pending)
            while True:
                if self._is_cut(self._cursor.live.place):
                    return PassState.EXHAUSTED
                try:
                    delivery = next(deliveries)
                except StopIteration:
                    return PassState.EXHAUSTED
                except Exception as error:
                    if self._boundaries.reopens_after(error):
                        deliveries.close()
                        deliveries = self._open()
                        continue
                    if not self._boundaries.stops_after(error):
                        raise
                    return PassState.SETTLED
                before = self._cursor.live
                try:
                    with uninterrupted:
                        self._take(delivery)
                except BaseException:  # Ctrl-C was held back: the loop does not get this batch
                    self._cursor.rewind(before)
                    raise
                yield delivery.data
                with uninterrupted:
                    self._tell_of_count(live.epoch)
                    self._require_lookahead()
                    if self._rule.is_due(self._pending) and not self._is_over(delivery):
                        self.pass_boundary()
                        if self._boundaries.has_halted or self._cursor.step == limit:
                            return PassState.SETTLED
        finally:
            with uninterrupted:
                deliveries.close()

    def _require_lookahead(self) -> None:
        if self._rule.is_early(self._pending):
            raise IterationStateError(
                f"iterator {self._name!r} has lookahead={self._rule.lookahead}: the loop should "
                f"fetch {self._rule.lookahead + 1} batches before its first weight update, and an "
                f"update came after {self._pending}. Leave lookahead= out, or give the right number"
            )

    def _is_over(self, delivery: Delivery) -> bool:
        """Whether nothing is left of the epoch, so that its boundary waits until the tail has run.

        With batches ahead of the update something is. A loader of unknown length fetches the next
        batch to tell, and keeps it: ask only where a boundary depends on the answer.
        """
        return not self._rule.lookahead and self.is_over(delivery.end)

    def _open(self) -> Deliveries:
        """The rest of the epoch, from the cursor on."""
        live = self._cursor.live
        if not live.place:
            self._adapter.measure()
        return self._adapter.open(epoch=live.epoch, start=live.place, state=live.state)

    def _take(self, delivery: Delivery) -> None:
        if not self._pending:
            self._rule.start_group()
        self._batch_start = self._cursor.live.place
        if self._last_update is not None:
            self._last_update.delivers()
        if self._ahead is not None and not self._ahead.delivers():
            self._ahead = None
        self._cursor.deliver(delivery)
        self._show(delivery, covered=delivery.end - self._batch_start)
        if self._pending == _MANY_UNUSED and not self._boundaries.num_passed:
            self._tell_of_no_update(epoch_over=False)
        if self._on_delivery is not None:
            self._on_delivery(self._name, delivery)

    def _tell_of_no_update(self, *, epoch_over: bool) -> None:
        if not self._rule.is_due(self._pending, epoch_over=epoch_over):
            self._boundaries.no_update(self._pending, epoch_over=epoch_over)

    def _show(self, delivery: Delivery, *, covered: int) -> None:
        self.last = delivery
        self.last_num_samples = None if delivery.weights is None else covered

    def _tell_of_count(self, epoch: int) -> None:
        running = self._running() if self._running else None
        self.counting.batch_used(running, epoch=epoch, batch=self.index)

    def _state_when_left(self, limit: int | None) -> PassState:
        is_used = self._rule.is_due(self._pending, epoch_over=True)
        is_over = is_used and self._is_whole(self._cursor.used.place)
        has_trained = self.current.has_trained(self._pending)
        if self._rule.counts_batches:  # the last group may be shorter
            has_trained |= self._rule.updated_in_group()
        if is_over and has_trained:
            return PassState.EXHAUSTED  # left on the last batch: nothing of the epoch is missing
        return PassState.LEFT if limit is None else PassState.PAUSED

    def evaluation(self, adapter: Adapter) -> Generator[Any, None, None]:
        """Every batch of the epoch from ``adapter``, which moves nothing here."""
        kept = self.last, self.last_num_samples
        if not self._cursor.live.place:
            adapter.measure()
        deliveries = adapter.open(epoch=self._cursor.live.epoch, start=0)
        place = 0
        try:
            for delivery in deliveries:
                self._show(delivery, covered=delivery.end - place)
                place = delivery.end
                yield delivery.data
                if self._is_cut(place):
                    return
        finally:
            deliveries.close()
            adapter.close()
            self.last, self.last_num_samples = kept

    def at_last_update(self) -> Position:
        """The position at the last weight update, of an iterator that marks no steps."""
        if self.current.state in (PassState.EXHAUSTED, PassState.LEFT):
            return self._cursor.position_after_epoch()
        if self._last_update is not None:
            return self._last_update.position()
        return self._cursor.position_used()

    # Between passes

    def settle(self, *, may_stop: bool = True, again: bool = False) -> None:
        """Bring the last pass to its end: pass its boundary, close its epoch or take it back.

        ``again``: the same epoch is to be served, so take back a pass that no update has used.
        """
        with self._boundaries.uninterrupted():
            self._settle(may_stop=may_stop, again=again)

    def _settle(self, *, may_stop: bool, again: bool) -> None:
        self.reset()
        if self._last_update is not None and self.current.state is PassState.LEFT:
            self._last_update.forget()
        todo = self.current.settlement(self._pending)
        if again and todo is Settlement.CLOSE_EPOCH:
            todo = Settlement.TAKE_BACK
        last_boundary = self.current.last_boundary
        was_paused = self.current.state is PassState.PAUSED
        self.current.settle()  # first: the boundary may raise, and must not be passed twice
        if todo is Settlement.CLOSE_EPOCH:
            self.close_epoch(may_stop=may_stop)
        elif todo is Settlement.PASS_BOUNDARY:
            self.pass_boundary(may_stop=may_stop)
        elif todo is Settlement.TAKE_BACK:
            self._cursor.rewind(last_boundary)
            self._batch_start = last_boundary.place
        if was_paused:
            self._cursor.take_back_ahead()

    def keep_epoch_open(self) -> None:
        """If the last pass was left early after training, let a later run serve the rest."""
        if self.current.state is PassState.LEFT and self.current.has_trained(self._pending):
            self.current.pause()

    def turn(self) -> None:
        """Close the epoch at the end of a turn of ``epochs()``."""
        with self._boundaries.uninterrupted():
            self.is_turning = True
            try:
                self.close_epoch()
            finally:
                self.is_turning = False

    def close_epoch(self, *, may_stop: bool = True) -> None:
        """Move to the next epoch, and pass the last boundary of this one if it is due.

        Batches after the last update (gradients still accumulating) do not make one due. They stay
        pending, and the boundary of the next update is reported as the epoch's. The groups of
        steps() go on over the end of an epoch, which its loop does not see.
        """
        live = self._cursor.live
        due = self._rule.is_due(live.uncommitted, epoch_over=not self._is_stream)
        if self._is_whole(live.place):
            num_unused = self._rule.num_unused(live.uncommitted)
            self.counting.epoch_ends(live.epoch, num_unused=num_unused)
            if live.place and not self.current.last_boundary.place:  # whole, without a boundary
                self._tell_of_no_update(epoch_over=True)
        was_left = self.current.was_left and not self._is_whole(live.place)
        self.counting.epoch_ended(live.epoch, self._index_at(live.place), was_left=was_left)
        self.last_report = self._cursor.end_epoch(was_left=was_left)
        self._batch_start = 0
        _log_report(self._name, self.last_report)
        if due:
            self.pass_boundary(may_stop=may_stop, drained=True)

    def pass_boundary(self, *, may_stop: bool = True, drained: bool = False) -> None:
        """Move the saved position up to what was used, then report the boundary.

        In this order: the manager reads the position while it is being told, and may raise.
        ``drained``: what was fetched ahead is used too.
        """
        epoch = self._cursor.saved.epoch
        self.current.boundary_passed(self._cursor.commit(drained=drained))
        self._rule.start_group()
        ends_epoch = self._cursor.saved.epoch > epoch
        self._boundaries.report(ends_epoch=ends_epoch, may_stop=may_stop)


def _log_report(name: str, report: EpochReport) -> None:
    if report.exact is False:
        logger.error(
            "iterator %r: epoch %d was not served exactly once (%d samples counted): %s",
            name,
            report.epoch,
            report.served,
            "; ".join(report.faults) or "audit=True names the samples",
        )
    if report.not_served:
        logger.info(
            "iterator %r: %d places of epoch %d were not served",
            name,
            report.not_served,
            report.epoch,
        )
