"""One ``Trainer`` and its loop: where a run is restored, and where its boundaries are passed.

``Trainer`` does not tell its callbacks enough, and no event comes early enough to choose the epoch
that it begins with. So these methods of the one instance are wrapped; every name of transformers'
that this relies on is in ``WRAPPED``, in ``progress.py``, or an argument of a wrapped method. The
order of a ``train()``::

    get_train_dataloader     ours, over the same dataset, instead of accelerate's
    _init_training_state     the Trainer prepares model and optimizer; then the manager is made and
                             restores; returns the epoch to begin with
    on_train_begin           counters are set again
    _run_epoch               ours counts from the middle of the first epoch; an epoch's last
                             boundary comes after its tail
    _finalize_training       the last boundary is durable before the best model is loaded

Boundaries within an epoch are passed by ``CFIterator`` when the Trainer fetches the first batch of
the next update. Training thread only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import transformers
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from checkfreq.errors import ConfigError
from checkfreq.integrations.transformers.loader import RestOfEpoch, TrainLoader, unprepared
from checkfreq.integrations.transformers.progress import Progress
from checkfreq.integrations.transformers.refusals import require_exact
from checkfreq.manager import CFManager
from checkfreq.state.checkpoint import CFCheckpoint
from iterators import CFIterator, isolated_rng
from iterators.adapters import adapted
from iterators.protocol import Adapter
from iterators.torch.loader import OrderFunction, ResumableDataLoader

#: Methods of ``Trainer`` that are wrapped. Those with an underscore are transformers' own affair,
#: and are there from 5.0 on.
WRAPPED = (
    *("train", "get_train_dataloader", "_init_training_state", "_prepare_for_training"),
    *("_evaluate", "evaluate", "_run_epoch", "_finalize_training"),
)


@dataclass(frozen=True)
class Options:
    """The arguments of ``CheckFreqCallback``."""

    chk_dir: str | os.PathLike[str]
    seed: int | None
    order: OrderFunction | None
    track: dict[str, Any]
    settled: tuple[str, ...]
    volatile: tuple[str, ...]
    per_rank: tuple[str, ...]
    manager: dict[str, Any]


class TrainingLoop:
    """Wraps the methods of ``trainer``, which train as ever once ``callback`` was removed.

    ``manager`` is that of the latest ``train()``.
    """

    def __init__(self, trainer: Trainer, callback: TrainerCallback, options: Options) -> None:
        self.trainer: Any = trainer  # much of what is used here has no types
        self._callback, self._options = callback, options
        self.manager: CFManager | None = None
        self._reset()
        around: tuple[Callable[..., Any], ...] = (
            *(self._train, self._get_train_dataloader, self._init_training_state),
            *(self._prepare_for_training, self._evaluate_first, self._evaluate),
            *(self._run_epoch, self._finalize_training),
        )
        for name, method in zip(WRAPPED, around, strict=True):
            self._wrap(trainer, name, method)
        self._wrap(trainer.callback_handler, "on_train_begin", self._train_begins)

    def _reset(self) -> None:
        """Nothing is being trained."""
        self._stack: contextlib.ExitStack | None = None
        self._loader: TrainLoader | None = None
        self._prepared: Any = None
        self._progress: Progress | None = None
        self._batches: CFIterator | None = None
        self._epochs: Iterator[int] = iter(())
        self._num_epochs = 0
        #: Batches of the first epoch that earlier processes have used.
        self._skipped = 0
        self._has_begun = self._is_restored = False

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            raise ConfigError(
                f"CheckFreqCallback: transformers {transformers.__version__} has no "
                f"{type(owner).__name__}.{name}, so its loop is not known here; install a version "
                "that checkfreq was tested with (docs/trainer.md)"
            )

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs)

        setattr(owner, name, call)

    # ---- from the beginning of train() to its end

    def _train(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._callback not in self.trainer.callback_handler.callbacks:
            return inner(*args, **kwargs)
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        require_exact(
            self.trainer,
            resumed_from=given.get("resume_from_checkpoint"),
            trial=given.get("trial"),
        )
        try:
            with contextlib.ExitStack() as self._stack:
                return inner(*args, **kwargs)
        finally:
            self._reset()

    def _get_train_dataloader(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._stack is None:  # somebody looks at the data
            return inner(*args, **kwargs)
        if self._loader is None:
            with unprepared(self.trainer.accelerator):
                plain = inner(*args, **kwargs)
            self._loader = TrainLoader(self._adapted(plain), plain)
        return self._loader

    def _adapted(self, plain: Any) -> Adapter:
        options, seed = self._options, self._options.seed
        seed = self.trainer.args.data_seed if seed is None else seed
        if options.order is not None and isinstance(plain, DataLoader):
            return ResumableDataLoader.like(plain, seed=seed, order=options.order)
        return adapted(plain, seed=seed, exact=True)

    def _init_training_state(
        self, inner: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        begins: tuple[int, int] = inner(*args, **kwargs)
        if self._stack is None:
            return begins
        max_steps, self._num_epochs = given["max_steps"], given["num_train_epochs"]
        # The Trainer would do so next, and gets this result then. Nothing comes in between.
        self.trainer._prepare_for_training(max_steps, self._loader, None)
        self._restore(self._stack)
        assert self._batches is not None
        assert self._progress is not None
        if self._progress.is_over(max_steps):
            return self._num_epochs, 0
        return self._batches.epoch, 0

    def _prepare_for_training(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._stack is None:
            return inner(*args, **kwargs)
        if self._prepared is None:
            self._prepared = inner(*args, **kwargs)
        return self._prepared

    def _restore(self, stack: contextlib.ExitStack) -> None:
        trainer, options = self.trainer, self._options
        assert self._loader is not None
        progress = self._progress = Progress(trainer)
        manager = CFManager(options.chk_dir, self._checkpoint(progress), **options.manager)
        self.manager = stack.enter_context(manager)
        accumulate = trainer.args.gradient_accumulation_steps
        batches = CFIterator(self._loader.adapter, cf_manager=manager, accumulate=accumulate)
        self._batches = self._loader.batches = batches
        self._is_restored = manager.restore()
        if not self._is_restored:
            return
        self._skipped = batches.batch
        if self._skipped % accumulate:
            raise ConfigError(
                f"CheckFreqCallback: the checkpoint is {self._skipped} batches into epoch "
                f"{batches.epoch}, expected a multiple of gradient_accumulation_steps="
                f"{accumulate}: an update would be made of too few batches. Resume with the batch "
                "size, the ranks and the accumulation of the run before, until its epoch is over"
            )

    def _checkpoint(self, progress: Progress) -> CFCheckpoint:
        trainer, options = self.trainer, self._options
        tracked = {
            "model": trainer.model_wrapped,
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "scaler": trainer.accelerator.scaler,
            "trainer": progress.shared,
            "trainer_rank": progress.own,
        }
        tracked = {name: value for name, value in tracked.items() if value is not None}
        if both := sorted({*tracked} & {*options.track}):
            raise ConfigError(
                f"CheckFreqCallback(track=...): {', '.join(both)} is tracked already; expected "
                "names of your own"
            )
        return CFCheckpoint(
            settled=options.settled,
            volatile=options.volatile,
            per_rank=(*options.per_rank, "trainer_rank"),
            **tracked,
            **options.track,
        )

    # ---- the loop

    def _train_begins(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        control = inner(*args, **kwargs)
        if self._progress is not None:
            self._progress.apply(control)
            self._begin_epoch()
        return control

    def _begin_epoch(self) -> None:
        """Pass the last boundary of the epoch before, if there is one; begin the next."""
        assert self._batches is not None
        if not self._has_begun:
            self._epochs, self._has_begun = self._batches.epochs(self._num_epochs), True
        if next(self._epochs, None) is None:
            self.trainer.control.should_training_stop = True

    def _run_epoch(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._batches is None:
            inner(*args, **kwargs)
            return
        given = inspect.signature(inner).bind(*args, **kwargs).arguments
        if self._skipped:
            accumulate = self.trainer.args.gradient_accumulation_steps
            given["steps_in_epoch"] = RestOfEpoch(given["steps_in_epoch"], self._skipped)
            given["num_update_steps_per_epoch"] -= self._skipped // accumulate
            self._skipped = 0
        inner(**given)
        is_last = given["epoch"] + 1 >= self._num_epochs
        if not is_last and not self.trainer.control.should_training_stop:
            self._begin_epoch()

    def _evaluate_first(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``eval_on_start`` is for the start of the run, not for every process of it."""
        if self._is_restored and kwargs.get("skip_scheduler", False):
            return {}
        return inner(*args, **kwargs)

    def _evaluate(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep the generators of training: evaluation may draw more in a resumed process."""
        if self._stack is None:
            return inner(*args, **kwargs)
        with isolated_rng():
            return inner(*args, **kwargs)

    def _finalize_training(
        self,
        inner: Callable[..., Any],
        trial: Any,
        num_train_samples: Any,
        start_time: float,
    ) -> Any:
        if self.manager is not None and self._progress is not None:
            self.manager.close()  # the last boundary; the best model may be loaded next
            start_time -= self._progress.seconds_before
        return inner(trial, num_train_samples, start_time)
