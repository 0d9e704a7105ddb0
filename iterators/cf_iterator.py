"""``CFIterator``: a loader that knows where training stands in it, and marks the boundaries.

The cursor moves at the iteration boundary, never when a batch is sampled, prefetched or handed
out: a boundary is passed before the next batch is fetched, if a weight update was attempted
since the last one. So a checkpoint taken there holds the weights and the place that belong
together. An epoch's last boundary waits until the epoch's tail (validation, scheduler) has run;
where only the loader's end says which one is the last (an iterable dataset), the next batch is
fetched first, and kept.
Training thread only.

A pass is one ``for batch in iterator`` loop. ``_Pass`` says how the last one ended, which
decides what the next one means.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from iterators.adapters import adapted
from iterators.errors import CorruptPositionError, IterationStateError, TrainingStopped
from iterators.loop.counting import Counting
from iterators.loop.cursor import Cursor, EpochReport, Mark
from iterators.loop.tails import TailWatch
from iterators.order.epoch import Int64
from iterators.order.position import Layout, Position
from iterators.protocol import Adapter, Delivery, Manager
from iterators.replay.adapter import ReplayAdapter

logger = logging.getLogger(__name__)

#: Above it nobody types a seed: torch's own, in a process that was not seeded, has 64 bits.
LARGEST_TYPED = (1 << 32) - 1


class _Pass(Enum):
    NONE = "none open: the next one continues at the live place"
    OPEN = "running, or held by someone"
    EXHAUSTED = "every batch was served: the epoch is over, its last boundary is not yet passed"
    LEFT = "left early: the epoch is over if anything was learnt from it"
    PAUSED = "left early in steps(): the next one continues"


class CFIterator:
    """Iterate ``loader`` so that training resumes exactly, in mid-epoch too.

    ``loader`` is a torch ``DataLoader``, over a map-style dataset (rebuilt in our order, see
    ``ResumableDataLoader.like``) or an iterable one (see ``ResumableIterableLoader``), a DALI
    iterator over ``iterators.dali.FileReader``, or any ``Adapter``. Another one is refused with the
    reason (``NotResumableError``) unless ``exact=False``, which resumes by loading everything up
    to the place again.

    ``seed`` fixes the order and the augmentation of every epoch. By default it is that of the
    loader's sampler or generator, else ``torch.initial_seed()``, on all ranks rank 0's; a restored
    run then keeps the seed it had. One that is given must be that of the restored run.

    A loop that needs the index of a batch, to log or to accumulate gradients, writes ``for i,
    batch in train_loader.enumerate():``, or uses ``train_loader.batch``: after a restore they
    go on where the epoch was left, where Python's ``enumerate(train_loader)`` counts from 0.

    With ``cf_manager``, the position is saved with every checkpoint under ``name``, and each
    boundary is reported to the manager; ``marks_steps=False`` for every iterator but one (for
    validation, or a second source: its position then moves with each batch it hands out, so
    ``zip`` the one that marks steps first).
    A boundary needs an attempted weight update since the last one; ``accumulate=N`` makes it
    every N batches instead (a shorter group at an epoch's end counts too). Without a manager
    every batch counts as an update.

    ``steps_to_run`` ends iteration after that many boundaries in this process. ``on_stop`` says
    what a honoured stop notice does: "raise" ``TrainingStopped``, or "return" quietly.
    ``chk_freq`` and ``dynamic`` are handed to the manager. ``audit=True`` spends a bit per
    sample so that ``last_report`` names missing and doubled ones.
    """

    _pass: _Pass
    _anchor: Mark
    _pass_boundaries: int
    _boundaries: int
    _updates_before: int
    _updates_before_pass: int
    _halted: bool
    _generators_set: bool
    _running: weakref.ref[Generator[Any, None, None]] | None

    def __init__(
        self,
        loader: Iterable[Any] | Adapter,
        *,
        seed: int | None = None,
        cf_manager: Manager | None = None,
        name: str = "train",
        marks_steps: bool = True,
        accumulate: int | None = None,
        exact: bool = True,
        steps_to_run: int | None = None,
        chk_freq: int | None = None,
        dynamic: bool | None = None,
        on_stop: Literal["raise", "return"] = "raise",
        audit: bool = False,
    ) -> None:
        _require_positive(accumulate=accumulate, steps_to_run=steps_to_run)
        if on_stop not in ("raise", "return"):
            raise ValueError(f"on_stop must be 'raise' or 'return', got {on_stop!r}")
        self._adapter = adapted(loader, seed=seed, exact=exact)
        self._takes_seed = seed is None and self._adapter.takes_seed
        self._cursor = Cursor(self._adapter, audit=audit)
        self._manager, self.marks_steps = cf_manager, marks_steps
        self._notified = cf_manager if marks_steps else None
        self._accumulate, self._steps_to_run, self._on_stop = accumulate, steps_to_run, on_stop
        self.name = name
        self._counting = Counting(name)
        self._tail = TailWatch(name)
        self._last: Delivery | None = None
        self._last_num_samples: int | None = None
        self._last_report: EpochReport | None = None
        self._batch_place = self._cursor.live.place
        self._start_counting()
        self._register(chk_freq, dynamic)

    # What the loop reads

    @property
    def epoch(self) -> int:
        """The epoch being served, from 0; it advances after the epoch's tail."""
        return self._cursor.live.epoch

    @property
    def batch(self) -> int:
        """Index in its epoch of the batch handed out last, from 0; continues after a restore.

        Before the first batch of an epoch, or of a process, the index of the one to come.
        """
        self._counting.asked()
        return self._index

    @property
    def _index(self) -> int:
        whole = self._adapter.batches_left(0)
        left = self._adapter.batches_left(self._batch_place)
        return self._batch_place if whole is None or left is None else whole - left

    @property
    def step(self) -> int:
        """Boundaries passed since training began; restores continue it."""
        return self._cursor.step

    @property
    def world(self) -> int:
        """Ranks that share the data."""
        return self._adapter.layout.world

    @property
    def exact(self) -> bool:
        """Whether the loader resumes exactly; False only under ``exact=False``."""
        return not isinstance(self._adapter, ReplayAdapter)

    @property
    def last_ids(self) -> Int64 | None:
        """The samples of the batch handed out last, ``[N] int64``; None if unknown."""
        return self._last.ids if self._last else None

    @property
    def last_weights(self) -> NDArray[np.float32] | None:
        """One weight per sample of the batch handed out last, ``[N] float32``; None if unknown.

        All ones, except for the pad (0) of a rank for which an epoch's tail had no sample:
        multiply the per-sample loss by it (see ``last_num_samples``).
        """
        return self._last.weights if self._last else None

    @property
    def last_num_samples(self) -> int | None:
        """Samples of the batch handed out last over all ranks, pads excluded; None if unknown.

        ``(loss * last_weights).sum() * world / last_num_samples`` is the loss whose gradient,
        averaged over the ranks as DDP does, is that of the mean over the whole batch.
        """
        return self._last_num_samples

    @property
    def last_report(self) -> EpochReport | None:
        """What the last epoch that ended in this process served; None before."""
        return self._last_report

    def __len__(self) -> int:
        """Batches in a whole epoch, also after a restore in the middle of one.

        For an iterable dataset it is torch's estimate.
        """
        whole = self._adapter.num_batches()
        if whole is None:
            raise TypeError("the loader has no length")
        return whole

    @property
    def is_using_batch(self) -> bool:
        """Whether a batch handed out since the last boundary counts for the next one.

        False after a loop that was left before it learnt anything: that is taken back.
        """
        if not self.marks_steps or not self._cursor.live.uncommitted:
            return False
        return self._pass not in (_Pass.LEFT, _Pass.PAUSED) or not self._takes_back(self._pass)

    # The loops

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch, or the rest of it after a restore.

        Passes the boundary still pending from the pass before. A pass that was left early before
        any update (a look at one batch) is taken back; any other ends its epoch.
        """
        self._settle()
        return self._start_pass(None)

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """The batches of one epoch as ``iter`` gives them, each with its index in the epoch.

        As Python's ``enumerate``, but the index goes on after a restore: the last batch of an epoch
        is ``len(train_loader) - 1`` (and ``start``) in a resumed run too.
        """
        self._counting.asked()
        self._settle()
        return self._numbered(self._start_pass(None), start)

    def _numbered(
        self, batches: Generator[Any, None, None], start: int
    ) -> Generator[tuple[int, Any], None, None]:
        try:
            for batch in batches:
                yield self._index + start, batch
        finally:
            batches.close()

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs up to ``total`` in all: none if a restored run already had them.

        None either if it was finished before (the manager's ``finish()``, for early stopping).

        What the loop's body does after the batches is the epoch's tail. It should draw no more from
        the global generators in a resumed process than in any: ``with isolated_rng(): validate()``.
        """
        _require_count("total", total)
        return self._epochs(total)

    def steps(self, total: int) -> Iterator[Any]:
        """Batches until ``total`` boundaries in all were passed, across epochs.

        There is no tail here: an epoch's last boundary is passed like any other. Leaving early
        only pauses; batches since the last boundary come again, unless an update was attempted
        or ``accumulate`` counts them. Each call opens the epoch again.
        """
        _require_count("total", total)
        return self._steps(total)

    def reset(self) -> None:
        """End a pass that is still open, as DALI's loops do after each epoch.

        Workers that do not persist stop.

        The boundary still pending is passed by the next loop, so a tail after it is still in
        the epoch.
        """
        running = self._running() if self._running else None
        if running is not None and getgeneratorstate(running) != GEN_RUNNING:
            running.close()

    def finish(self) -> None:
        """Pass a boundary still pending after the last batch: a manager calls it on a clean close.

        An epoch whose batches were all served is closed; one left early stays open, so that a
        longer run serves the rest.
        """
        self.reset()
        if self._pass is _Pass.LEFT and self.marks_steps and self._learnt():
            self._pass = _Pass.PAUSED
        self._settle(may_stop=False)
        self._adapter.close()

    # The position

    def state_dict(self) -> dict[str, Any]:
        """The position as of the last boundary, JSON-able; under 1 kB but for the loader's state.

        It is one rank's: ``merged_state`` makes one of those of all ranks that share the data.

        Between a batch and its boundary it is the place before that batch. With
        ``marks_steps=False`` it counts everything handed out.
        """
        if self.marks_steps:
            return self._cursor.saved.to_dict()
        epoch_over = self._pass in (_Pass.EXHAUSTED, _Pass.LEFT)
        return self._cursor.position_after(epoch_over=epoch_over).to_dict()

    def merged_state(self, states: Sequence[Mapping[str, Any]], /) -> dict[str, Any] | None:
        """The one position to load on every rank, from those that all ranks saved, in their order.

        The ranks that load it may be more or fewer. None if the saved ones did not share the data
        (each had a world of one): then each continues from its own. Changes nothing.

        Raises ``CorruptPositionError`` for a damaged position, a missing one, or ranks that do
        not stand at the same point; the message names the rank.
        """
        positions = [_saved_by(rank, state) for rank, state in enumerate(states)]
        if not positions:
            raise CorruptPositionError("there is no position of any rank to continue from")
        if all(one.layout.world == 1 for one in positions):
            equal = all(one == positions[0] for one in positions)
            return positions[0].to_dict() if equal else None
        try:
            return positions[0].merged(*positions[1:]).to_dict()
        except ValueError as error:
            raise CorruptPositionError(
                f"the positions of {len(positions)} rank(s) do not make one: {error}"
            ) from error

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue from a saved position, before iteration began; may be repeated until then.

        Raises ``ResumeMismatchError`` for a position of other data, ``CorruptPositionError`` for
        a damaged one, ``IterationStateError`` once a batch was used. Nothing changes then.
        """
        position = Position.from_dict(state)
        live = self._adapter.identity
        if self._takes_seed:
            live = replace(live, seed=position.identity.seed)
        position.require(live)
        self._adapter.accept(position)
        self._require_fresh()
        _log_changes(position, self._adapter)
        if live != self._adapter.identity:
            _log_seeds(self.name, position, self._adapter)
            self._adapter.reseed(live.seed)
        self._cursor.load(position)
        self._batch_place = position.position
        self._pass = _Pass.NONE
        self._start_counting()
        if position.position:
            self._counting.resumed(position.epoch)

    # Passes

    def _start_pass(self, limit: int | None) -> Generator[Any, None, None]:
        """Remembered weakly: a loop that is left must let the generator go, and end its workers."""
        running = self._serve(limit)
        self._running = weakref.ref(running)
        return running

    def _serve(self, limit: int | None) -> Generator[Any, None, None]:
        if self._is_over():
            return
        self._pass, self._anchor, self._pass_boundaries = _Pass.OPEN, self._cursor.live, 0
        self._updates_before_pass = self._manager.update_attempts if self._manager else 0
        end = _Pass.NONE
        try:
            end = yield from self._delivered(limit)
            if end is _Pass.EXHAUSTED and limit is None and self._notified is not None:
                self._tail.begins()
        except GeneratorExit:
            end = self._left_by(limit)
            raise
        except BaseException:  # of the loader, perhaps before the boundary of a finished update
            end = _Pass.PAUSED if self._update_attempted() else _Pass.NONE
            raise
        finally:
            self._pass = end

    def _left_by(self, limit: int | None) -> _Pass:
        if self._learnt() and self._adapter.batches_left(self._cursor.live.place) == 0:
            return _Pass.EXHAUSTED  # left on the last batch: nothing is missing
        return _Pass.LEFT if limit is None else _Pass.PAUSED

    def _delivered(self, limit: int | None) -> Generator[Any, None, _Pass]:
        live = self._cursor.live
        try:
            deliveries = self._adapter.open(epoch=live.epoch, start=live.place, state=live.state)
        except Exception as error:
            if not self._is_stopped_by(error):
                raise
            return _Pass.NONE
        try:
            self._set_generators()
            while True:
                try:
                    delivery = next(deliveries)
                except StopIteration:
                    break
                except Exception as error:
                    if not self._is_stopped_by(error):
                        raise
                    return _Pass.NONE
                self._take(delivery)
                yield delivery.data
                self._tell_of_count(live)
                if self._update_attempted() and not self._adapter.is_over(delivery.end):
                    self._pass_boundary()
                    if self._halted or self._cursor.step == limit:
                        return _Pass.NONE
        finally:
            deliveries.close()
        return _Pass.EXHAUSTED

    def _is_stopped_by(self, error: Exception) -> bool:
        """The loader failed: whether the manager knows that the run is to stop.

        It is for the caller to raise ``error`` again: raised from here, it would hold itself, and
        with it the loader's workers.
        """
        stops_after = getattr(self._manager, "stops_after", None)
        if stops_after is None or not stops_after(error):
            return False
        self._halted = True
        if self._on_stop == "raise":
            raise TrainingStopped("stopped on request, while its loader failed") from error
        return True

    def _tell_of_count(self, resumed_at: Mark) -> None:
        running = self._running() if self._running else None
        self._counting.batch_used(running, epoch=resumed_at.epoch, batch=self._index)

    def _set_generators(self) -> None:
        began = self._boundaries or self._cursor.live.uncommitted or self._generators_set
        if self._notified is not None and not began:
            self._notified.before_first_batch()

    def _take(self, delivery: Delivery) -> None:
        if self._manager is not None and not self._cursor.live.uncommitted:
            self._updates_before = self._manager.update_attempts
        self._batch_place = self._cursor.live.place
        covered = delivery.end - self._batch_place
        self._last_num_samples = None if delivery.weights is None else covered
        self._cursor.deliver(delivery)
        self._last = delivery

    def _epochs(self, total: int) -> Iterator[int]:
        self._settle()
        if not self._cursor.live.place:
            # What a script draws between here and the epoch's first batch is not a repetition.
            self._set_generators()
            self._generators_set = True
        while (epoch := self._cursor.live.epoch) < total and not self._is_over():
            yield epoch
            self._tail.ends()
            self.reset()
            if self._is_over():
                return
            closed = self._pass is _Pass.NONE and self._cursor.live.epoch > epoch
            self._pass = _Pass.NONE
            if not closed:  # finish() may have done it in the tail
                self._close_epoch()

    def _steps(self, total: int) -> Iterator[Any]:
        self._counting.asked()  # there are no epochs here to count in
        self._settle()
        while self._cursor.step < total and not self._is_over():
            start = self._cursor.live
            yield from self._start_pass(total)
            if self._cursor.live is start and not start.place:
                raise IterationStateError(
                    f"the loader served no batch in epoch {start.epoch}: it is used up"
                )
            self._settle()

    def _is_over(self) -> bool:
        """Whether nothing more is handed out, here or (``finished``) in any process."""
        return self._halted or bool(getattr(self._notified, "finished", False))

    # Boundaries

    def _settle(self, *, may_stop: bool = True) -> None:
        """Bring the pass before to its end."""
        self.reset()
        ended, self._pass = self._pass, _Pass.NONE
        if ended is _Pass.EXHAUSTED:
            self._close_epoch(may_stop=may_stop)
        elif ended in (_Pass.LEFT, _Pass.PAUSED):
            if self._takes_back(ended):
                self._rewind()
            elif ended is _Pass.LEFT:
                self._close_epoch(may_stop=may_stop)
            elif self._update_attempted():
                self._pass_boundary(may_stop=may_stop)

    def _takes_back(self, ended: _Pass) -> bool:
        """Whether what a pass left early handed out since its last boundary comes again.

        In a pause, unless an update was attempted, or ``accumulate`` says that batches count.
        """
        if ended is _Pass.PAUSED:
            return self._accumulate is None and not self._update_attempted()
        return not self._learnt()

    def _learnt(self) -> bool:
        """Whether the last pass led to an update, so that its batches must not come again."""
        if self._pass_boundaries:
            return True
        if self._notified and self._notified.update_attempts == self._updates_before_pass:
            return False
        return self._update_attempted()

    def _rewind(self) -> None:
        self._cursor.rewind(self._anchor)
        self._batch_place = self._anchor.place

    def _update_attempted(self, *, epoch_over: bool = False) -> bool:
        """Whether a boundary is due: batches were handed out, and then an update attempted."""
        pending = self._cursor.live.uncommitted
        if not pending:
            return False
        if self._accumulate is not None:
            return epoch_over or pending >= self._accumulate
        if self._notified is None:
            return True
        return self._notified.update_attempts != self._updates_before

    def _num_unused(self) -> int:
        """Batches handed out since the last boundary that no update came after."""
        if self._notified is None or self._notified.update_attempts != self._updates_before:
            return 0
        return self._cursor.live.uncommitted

    def _close_epoch(self, *, may_stop: bool = True) -> None:
        """Move to the next epoch and pass the last boundary of this one.

        Batches after the last update (gradients still accumulating) have no boundary of their
        own: they stay uncommitted until the next one, which is then reported as the epoch's.
        """
        due = self._update_attempted(epoch_over=True)
        live = self._cursor.live
        if self._adapter.batches_left(live.place) == 0:
            self._counting.epoch_ends(live.epoch, num_unused=self._num_unused())
        self._last_report = self._cursor.end_epoch()
        self._batch_place = 0
        _log_report(self.name, self._last_report)
        if due:
            self._pass_boundary(may_stop=may_stop)

    def _pass_boundary(self, *, may_stop: bool = True) -> None:
        """Cursor first: the manager saves the place that belongs to the weights it sees."""
        crossed = self._cursor.live.crossed
        self._cursor.commit()
        self._anchor = self._cursor.live
        self._boundaries += 1
        self._pass_boundaries += 1
        self._halted = self._boundaries == self._steps_to_run
        if self._notified is None:
            return
        if crossed:
            self._notified.end_epoch()
        else:
            self._notified.step()
        if may_stop and self._notified.stopped:
            self._stop()

    def _stop(self) -> None:
        self._halted = True
        if self._on_stop == "raise":
            raise TrainingStopped

    # Setting up

    def _start_counting(self) -> None:
        self._pass = _Pass.NONE
        self._anchor = self._cursor.live
        self._pass_boundaries = self._boundaries = 0
        self._updates_before = self._updates_before_pass = 0
        self._halted = self._generators_set = False
        self._running = None

    def _register(self, chk_freq: int | None, dynamic: bool | None) -> None:
        paced = chk_freq is not None or dynamic is not None
        if self._manager is None:
            if paced:
                raise ValueError("chk_freq and dynamic are the manager's: give cf_manager too")
            return
        if paced:
            self._manager.register_pacing(chk_freq=chk_freq, dynamic=dynamic)
        self._manager.register_position(self.name, self)

    def _require_fresh(self) -> None:
        used = self._pass is _Pass.EXHAUSTED or self._boundaries > 0 or self._learnt()
        if self._pass is _Pass.OPEN or (self.marks_steps and used):
            raise IterationStateError(
                f"iterator {self.name!r} has already served batches that were used: load the "
                "position before the first loop, or make a new iterator"
            )


def _require_positive(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _require_count(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")


def _saved_by(rank: int, state: Mapping[str, Any]) -> Position:
    try:
        return Position.from_dict(state)
    except CorruptPositionError as error:
        raise CorruptPositionError(f"rank {rank}: {error}") from error


def _log_changes(position: Position, adapter: Adapter) -> None:
    then, now = position.layout, adapter.layout
    if then != now and then != Layout():
        logger.info("resuming at another layout: %s, saved at %s", now.to_dict(), then.to_dict())
    counted, behind = position.ledger.count, position.position
    if adapter.order(position.epoch) is not None and counted != behind:
        logger.warning(
            "the restored position accounts for %d of the %d samples behind it, so the epoch's end "
            "will be checked only for those that come. Is it one rank's (merged_state makes one "
            "of all), or a sampler's?",
            counted,
            behind,
        )
    if position.identity.tail != adapter.identity.tail:
        logger.warning(
            "the tail policy is %r, saved with %r", adapter.identity.tail, position.identity.tail
        )


def _log_seeds(name: str, position: Position, adapter: Adapter) -> None:
    """Say whose seed it is; of a script that sets none, torch's differs at every start."""
    logger.log(
        logging.WARNING if adapter.identity.seed <= LARGEST_TYPED else logging.INFO,
        "iterator %r: the restored run goes on with its own seed, %d; this script's is %d (of "
        "torch.manual_seed, or the loader's generator). Another seed is another run, in a "
        "directory of its own or with fresh=True",
        name,
        position.identity.seed,
        adapter.identity.seed,
    )


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
        logger.info("iterator %r: epoch %d left %d unserved", name, report.epoch, report.not_served)
