"""``CFIterator``: the loader that a training loop iterates over, and whose position is saved.

The loops (``iter``, ``enumerate``, ``epochs``, ``steps``) and the saved position are here. What
happens between two batches, and when a boundary is passed, is in ``iterators/loop/runner.py``.
Training thread only.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from iterators.adapters import adapted
from iterators.errors import IterationStateError, NotResumableError
from iterators.loop.ahead import AheadWatch
from iterators.loop.boundaries import Boundaries
from iterators.loop.boundary_rule import BoundaryRule
from iterators.loop.cursor import Cursor, EpochReport
from iterators.loop.last_update import LastUpdate, marks_for
from iterators.loop.passes import PassState
from iterators.loop.restarted_loops import EpochsWatch
from iterators.loop.restore_log import log_changes, log_nothing_left, log_seeds
from iterators.loop.runner import PassRunner
from iterators.order.epoch import Int64
from iterators.order.position import Position, merge_saved
from iterators.protocol import Adapter, Delivery, Manager
from iterators.replay.adapter import ReplayAdapter


class CFIterator:
    """Iterate over ``loader`` so that an interrupted run resumes exactly, in mid-epoch too.

    ::

        train_loader = CFIterator(DataLoader(dataset, 64, shuffle=True), cf_manager=manager)
        for epoch in train_loader.epochs(90):
            for images, labels in train_loader:
                train_step(images, labels)
            validate(model)

    The position in the data moves at an *iteration boundary*: before the next batch is fetched, if
    a weight update was attempted since the last boundary. A checkpoint taken there holds weights
    and a position that belong together; batches that were only prefetched, or that no update has
    used yet, are served again. The last boundary of an epoch is passed after the epoch's tail, the
    code that follows the inner loop (validation, a scheduler).

    ``loader`` is one of

    - a torch ``DataLoader`` over a map-style dataset (rebuilt with our own order, see
      ``ResumableDataLoader.like``) or an iterable one (see ``ResumableIterableLoader``);
    - a DALI iterator over ``iterators.dali.FileReader``;
    - any ``iterators.protocol.Adapter``.

    Any other loader, or one that cannot be resumed exactly, is refused with the reason
    (``NotResumableError``). With ``exact=False`` it is accepted, and a resumed run loads all
    batches up to the position again.

    Arguments
        seed: fixes the order and the augmentation of every epoch. Default: the seed of the loader's
            sampler or generator, else ``torch.initial_seed()``; ranks that share the data use rank
            0's. A restored run keeps the seed it was started with. A seed given here must equal it.
        cf_manager: saves the position with every checkpoint and is told about each boundary.
            Without a manager, every batch counts as an update.
        name: the name under which the manager saves the position.
        marks_steps: False for every iterator but one, for example those for validation or for a
            second source of data. The position of such an iterator, too, is that of the last
            update, in whatever order a ``zip`` asks the two.
        accumulate: pass a boundary every ``accumulate`` batches, instead of after each attempted
            weight update. A shorter group at the end of an epoch counts too; in ``steps()``, a
            group goes on in the next epoch.
        batches_per_epoch: end each epoch after this many batches, at the latest: what
            ``islice(train_loader, n)`` or a ``break`` after ``n`` batches does, but counted over
            restarts. The rest of the epoch is not served; the next one has an order of its own.
        lookahead: batches that the loop fetches before it uses one, as a prefetcher around this
            iterator does. They belong to later updates and are served again after a restore. By
            default a look-ahead is warned about; 0 says that there is none.
        exact: whether to refuse a loader that can only be resumed by loading again.
        steps_to_run: end iteration after this many boundaries in this process.
        chk_freq: handed to the manager: boundaries between two checkpoints.
        dynamic: handed to the manager: whether to adapt that interval to measured costs.
        on_stop: what to do once a stop notice was honoured: "raise" ``TrainingStopped``, or
            "return", which ends the loops quietly.
        audit: keep one bit per sample, so that ``last_report`` names missing and doubled samples.

    A loop that needs the index of a batch, to log or to accumulate gradients, uses ``for i, batch
    in train_loader.enumerate():`` or ``train_loader.batch``. After a restore in mid-epoch both
    continue where the epoch was interrupted; Python's ``enumerate(train_loader)`` starts at 0.

    Use it from the training thread only.
    """

    def __init__(
        self,
        loader: Iterable[Any] | Adapter,
        *,
        seed: int | None = None,
        cf_manager: Manager | None = None,
        name: str = "train",
        marks_steps: bool = True,
        accumulate: int | None = None,
        batches_per_epoch: int | None = None,
        lookahead: int | None = None,
        exact: bool = True,
        steps_to_run: int | None = None,
        chk_freq: int | None = None,
        dynamic: bool | None = None,
        on_stop: Literal["raise", "return"] = "raise",
        audit: bool = False,
    ) -> None:
        _require_positive(
            accumulate=accumulate, batches_per_epoch=batches_per_epoch, steps_to_run=steps_to_run
        )
        if on_stop not in ("raise", "return"):
            raise ValueError(f"on_stop must be 'raise' or 'return', got {on_stop!r}")
        _require_count("lookahead", lookahead or 0)
        self.name, self.marks_steps = name, marks_steps
        self._loader, self._adapter = loader, adapted(loader, seed=seed, exact=exact)
        self._takes_seed = seed is None and self._adapter.takes_seed
        self._lookahead = lookahead or 0
        self._cursor = Cursor(self._adapter, audit=audit, lookahead=self._lookahead)
        #: The epoch that ``epochs()`` is in, and which of its loops that is.
        self._turn: int | None = None
        self._loop: object = None
        #: Whether the last pass was not under ``torch.no_grad()``.
        self._had_gradients = False
        self._boundaries = Boundaries(
            cf_manager, marks_steps=marks_steps, steps_to_run=steps_to_run, on_stop=on_stop
        )
        self._runner = PassRunner(
            name,
            self._adapter,
            self._cursor,
            rule=BoundaryRule(
                cf_manager if marks_steps else None,
                accumulate=accumulate,
                lookahead=self._lookahead,
            ),
            boundaries=self._boundaries,
            on_delivery=getattr(cf_manager, "on_delivery", None),
            batches_per_epoch=batches_per_epoch,
            last_update=_last_update(cf_manager, self._cursor, marks_steps=marks_steps),
            ahead=AheadWatch(name, cf_manager) if cf_manager and lookahead is None else None,
        )
        self._batches_per_epoch = batches_per_epoch
        self._epochs_watch: EpochsWatch | None = None
        if cf_manager is not None and marks_steps:
            self._epochs_watch = EpochsWatch(name)
            marks_for(cf_manager, self._runner)
        # Last: a manager that has already restored applies the position while it registers.
        self._register(cf_manager, chk_freq=chk_freq, dynamic=dynamic)

    # What the loop reads

    @property
    def epoch(self) -> int:
        """The epoch being served, from 0. It advances after the epoch's tail."""
        if self._epochs_watch is not None:
            self._epochs_watch.asked()
        return self._cursor.live.epoch

    @property
    def batch(self) -> int:
        """Index in its epoch of the batch handed out last, from 0. Continues after a restore.

        Before the first batch of an epoch, or of a process, the index of the batch to come.
        """
        self._runner.counting.asked()
        return self._runner.index

    @property
    def step(self) -> int:
        """Boundaries passed since training began, over all processes of the run."""
        return self._cursor.step

    @property
    def world(self) -> int:
        """Number of ranks that share the data."""
        return self._adapter.layout.world

    @property
    def exact(self) -> bool:
        """Whether the loader resumes exactly; False only under ``exact=False``."""
        return not isinstance(self._adapter, ReplayAdapter)

    @property
    def last_ids(self) -> Int64 | None:
        """The sample ids of the batch handed out last, ``[N] int64``; None if unknown."""
        return self._last.ids if self._last else None

    @property
    def last_weights(self) -> NDArray[np.float32] | None:
        """One weight per sample of the batch handed out last, ``[N] float32``; None if unknown.

        All weights are 1, except that of a pad, which is 0: where the last batch of an epoch has
        fewer samples than there are ranks, a rank without a sample gets a pad to keep it in step.
        Multiply the per-sample loss by the weights (see ``last_num_samples``).
        """
        return self._last.weights if self._last else None

    @property
    def last_num_samples(self) -> int | None:
        """Samples in the batch handed out last, over all ranks and without pads; None if unknown.

        ``(loss * last_weights).sum() * world / last_num_samples`` is a loss whose gradient,
        averaged over the ranks as DistributedDataParallel does, is the gradient of the mean over
        the global batch.
        """
        return self._runner.last_num_samples

    @property
    def last_report(self) -> EpochReport | None:
        """What the last epoch that ended in this process served; None before the first end."""
        return self._runner.last_report

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch handed out last is the last of its epoch.

        A loader without a length fetches the next batch to find out, and keeps it.
        """
        return self._runner.is_over(self._cursor.live.place)

    @property
    def is_using_batch(self) -> bool:
        """Whether a batch handed out since the last boundary counts for the next boundary.

        False after a loop that was left before any update: its batches will be served again.
        """
        return self.marks_steps and self._runner.is_using_batch

    @property
    def _last(self) -> Delivery | None:
        return self._runner.last

    def __len__(self) -> int:
        """Batches in a whole epoch, even after a restore in the middle of one.

        For an iterable dataset it is torch's estimate. ``TypeError`` if the loader has no length.
        """
        if not self._cursor.live.place:
            self._adapter.measure()  # the next epoch has the data that is there as it begins
        whole = self._adapter.num_batches()
        if whole is None:
            raise TypeError("the loader has no length")
        return min(whole, self._batches_per_epoch or whole)

    def __getattr__(self, name: str) -> Any:
        """Any other public attribute of the loader: ``dataset``, ``batch_size``, ``sampler``."""
        if not name.startswith("_") and hasattr(self._loader, name):
            return getattr(self._loader, name)
        of = "" if name.startswith("_") else f", nor has its {type(self._loader).__name__}"
        raise AttributeError(f"CFIterator has no attribute {name!r}{of}")

    # The loops

    def __iter__(self) -> Iterator[Any]:
        """The batches of one epoch, or the rest of them after a restore.

        Passes the boundary that the previous loop left pending. If that loop was left before any
        update (to look at one batch, say), its batches are served again; a loop that was left
        later has ended its epoch. A second loop within one turn of ``epochs`` is an evaluation
        (see ``evaluate``) under ``torch.no_grad()``, and an error elsewhere.
        """
        return self._evaluation() or self._next_pass()

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """The batches of one epoch, each with its index in the epoch, counted from ``start``.

        Like Python's ``enumerate``, except that the index continues after a restore: the last
        batch of an epoch has index ``start + len(train_loader) - 1`` in a resumed run too.
        """
        if (evaluation := self._evaluation()) is not None:
            return enumerate(evaluation, start)
        self._runner.counting.asked()
        return self._numbered(self._next_pass(), start)

    def _next_pass(self) -> Generator[Any, None, None]:
        self._runner.end()
        self._runner.settle(again=self._turn == self._cursor.live.epoch)
        if self._epochs_watch is not None:
            self._epochs_watch.pass_starts(self._cursor.live.epoch)
        self._had_gradients = _has_gradients()
        return self._runner.start_pass()

    def _evaluation(self) -> Iterator[Any] | None:
        """The batches of a second pass over the epoch; None for a pass that may train.

        Outside ``epochs()``, one without gradients after one with them is a second pass.
        """
        if not self.marks_steps or self._boundaries.is_over:
            return None
        epoch = self._cursor.live.epoch
        in_turn = self._turn == epoch
        is_second = in_turn or (self._had_gradients and self._boundaries.are_reported)
        if is_second and self._runner.is_in_epoch and not _has_gradients():
            return self.evaluate()
        if in_turn and self._runner.has_trained:
            raise IterationStateError(
                f"iterator {self.name!r}: a second loop within epoch {epoch} of epochs(), "
                "which was trained on already. To measure something on the training data, write "
                "`for batch in train_loader.evaluate()`, or loop under torch.no_grad(): neither "
                "moves the position. To train on, let the loop over epochs() come to its next turn"
            )
        return None

    def evaluate(self) -> Iterator[Any]:
        """Every batch of the present epoch once, for a measurement on the training data.

        Moves no position, draws nothing from the generators of training, and may be called at any
        time, also in the middle of an epoch. The batches come from a loader of their own, whose
        workers start with the loop and end with it. ``last_ids`` and the like are those of the
        evaluation as long as its loop runs. On several ranks each gets its share.

        Raises ``NotResumableError`` for a loader that cannot be opened twice, as a DALI pipeline.
        """
        twin = self._adapter.twin()
        if twin is None:
            raise NotResumableError(
                f"iterator {self.name!r}: {type(self._adapter).__name__} cannot be opened beside "
                "itself for an evaluation. Make a second loader for it"
            )
        return self._runner.evaluation(twin)

    def _numbered(
        self, batches: Generator[Any, None, None], start: int
    ) -> Generator[tuple[int, Any], None, None]:
        try:
            for batch in batches:
                yield self._runner.index + start, batch
        finally:
            batches.close()

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs that are still to be served, up to ``total`` epochs in all.

        Yields nothing if a restored run had already served them, or was declared finished (the
        manager's ``finish()``, for early stopping).

        The body of the loop iterates over the batches; what it does after them is the epoch's
        tail. Random numbers drawn in the tail must be the same in a resumed process as in an
        uninterrupted one. Validation often breaks that rule, so write
        ``with isolated_rng(): validate(model)``.
        """
        _require_count("total", total)
        return self._epochs(total)

    def _epochs(self, total: int) -> Iterator[int]:
        runner = self._runner
        loop = object()
        if self._turn is not None:  # an error left a loop that its traceback, say, still refers to
            self._leave_turn()
        self._loop = loop
        runner.settle()
        live = self._cursor.live
        if not live.place:
            self._boundaries.set_generators_before_epoch(pending=live.uncommitted)
        if live.epoch >= total and not self._boundaries.is_over:
            log_nothing_left(self.name, total)
        while (epoch := self._cursor.live.epoch) < total and not self._boundaries.is_over:
            self._turn = epoch
            try:
                yield epoch
            except GeneratorExit:
                if self._loop is loop:
                    self._leave_turn()
                raise
            self._turn = None
            runner.tail.ends()
            runner.end()
            if self._boundaries.is_over:
                return
            # finish() may have closed it in the tail.
            is_closed = (
                runner.current.state is PassState.SETTLED and self._cursor.live.epoch > epoch
            )
            runner.current.settle()
            if not is_closed:
                runner.turn()

    def _leave_turn(self) -> None:
        """An error, Ctrl-C or a break ended a loop over ``epochs()``: the epoch may still go on."""
        self._turn = None
        self._runner.reset()
        self._runner.keep_epoch_open()

    def steps(self, total: int) -> Iterator[Any]:
        """Batches, across epochs, until ``total`` boundaries were passed in all.

        There is no tail: the last boundary of an epoch is passed like any other. Leaving this loop
        early only pauses. The batches since the last boundary are served again then, unless an
        update was attempted or ``accumulate`` counts them. Each call reopens the epoch.

        ``ValueError`` with a ``lookahead``: the batches ahead of the last boundary would be trained
        on too.
        """
        _require_count("total", total)
        if self._lookahead and self.marks_steps:
            raise ValueError(
                f"steps() cannot be used with lookahead={self._lookahead}, since its last boundary "
                "comes while batches are ahead. Fetch the next batch after the update, or use "
                "epochs()"
            )
        return self._steps(total)

    def _steps(self, total: int) -> Iterator[Any]:
        self._runner.counting.asked()  # no epochs, so no index in an epoch to get wrong
        self._runner.settle()
        self._had_gradients = _has_gradients()
        while self._cursor.step < total and not self._boundaries.is_over:
            start = self._cursor.live
            yield from self._runner.start_pass(limit=total)
            if self._cursor.live is start and not start.place:
                raise IterationStateError(
                    f"the loader served no batch in epoch {start.epoch}: it is used up (a "
                    "generator, for example, can be iterated over only once)"
                )
            self._runner.settle()

    def reset(self) -> None:
        """End a pass that is still open, as DALI's loops do after each epoch.

        Stops loader workers that are not persistent. The pending boundary is passed by the next
        loop, so code between the two still belongs to the epoch.
        """
        self._runner.reset()

    def finish(self) -> None:
        """Pass the boundary behind the last batch, if one is pending, and release the workers.

        A manager calls this on a clean close. If every batch of the epoch was served, the epoch is
        closed. If the loop was left early, the epoch stays open, so that a longer run can serve
        the rest of it.
        """
        # A pass of a second source that a variable keeps goes on in a later run.
        goes_on = not self.marks_steps and self._runner.current.state is PassState.OPEN
        self._runner.reset()
        if self.marks_steps or goes_on:
            self._runner.keep_epoch_open()
        if not goes_on:
            self._runner.settle(may_stop=False)
        self._adapter.close()

    # The position

    def state_dict(self) -> dict[str, Any]:
        """The position at the last boundary: JSON-able, below 1 kB plus the loader's own state.

        Between a batch and its boundary this is the place before that batch. With
        ``marks_steps=False`` the position is that of the last weight update: it does not cover
        batches that were fetched since then for the next one.

        It is the position of one rank. ``merged_state`` combines those of all ranks.
        """
        at = self._cursor.saved if self.marks_steps else self._runner.at_last_update()
        return at.to_dict()

    def merged_state(self, states: Sequence[Mapping[str, Any]], /) -> dict[str, Any] | None:
        """Combine the saved positions of all ranks, in rank order, into the one that all load.

        More or fewer ranks may load the result. It is None if the ranks did not share the data
        (each was alone in its world) and their positions differ: then each rank loads its own.
        The iterator itself does not change.

        Raises ``CorruptPositionError`` if a position is damaged or missing, or if the ranks are not
        at the same point. The message names the rank.
        """
        return merge_saved(states)

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue from a saved position. Call it before iteration begins; it may be repeated.

        Raises ``ResumeMismatchError`` if the position belongs to other data,
        ``CorruptPositionError`` if it is damaged, and ``IterationStateError`` once a batch was
        used. The iterator does not change then.
        """
        position = Position.from_dict(state)
        saved, live = position.identity, self._adapter.identity
        if self._takes_seed:
            live = replace(live, seed=saved.seed)
        if self._adapter.takes_length and live.fingerprint == saved.fingerprint:
            live = replace(live, n=saved.n)
        position.require(live)
        self._adapter.accept(position)
        self._require_unused()
        log_changes(position, self._adapter)
        if live.seed != self._adapter.identity.seed:
            log_seeds(self.name, position, self._adapter)
            self._adapter.reseed(live.seed)
        if live.n != self._adapter.identity.n:
            self._adapter.measure(live.n)
        self._runner.load(position)
        if self._epochs_watch is not None:
            self._epochs_watch.resumed(position.epoch)

    def _require_unused(self) -> None:
        is_open = self._runner.current.state is PassState.OPEN
        if is_open or (self.marks_steps and self._runner.was_used):
            raise IterationStateError(
                f"iterator {self.name!r} has already served batches that were used: load the "
                "position before the first loop, or make a new iterator"
            )

    def _register(
        self, manager: Manager | None, *, chk_freq: int | None, dynamic: bool | None
    ) -> None:
        is_paced = chk_freq is not None or dynamic is not None
        if manager is None:
            if is_paced:
                raise ValueError("chk_freq and dynamic are for the manager: give cf_manager too")
            return
        if is_paced:
            manager.register_pacing(chk_freq=chk_freq, dynamic=dynamic)
        manager.register_position(self.name, self)


def _last_update(
    manager: Manager | None, cursor: Cursor, *, marks_steps: bool
) -> LastUpdate | None:
    return None if manager is None or marks_steps else LastUpdate(manager, cursor)


def _has_gradients() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is None or bool(torch.is_grad_enabled())


def _require_positive(**given: int | None) -> None:
    for name, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _require_count(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
