"""The callback that a user gives to a ``Trainer``. Training thread only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from transformers import Trainer, TrainerCallback

from checkfreq.errors import ConfigError
from checkfreq.integrations.transformers.loop import Options, TrainingLoop
from checkfreq.manager import CFManager
from iterators.torch.loader import OrderFunction


class CheckFreqCallback(TrainerCallback):
    """Checkpoint a ``Trainer`` into ``chk_dir``, and continue there exactly.

    ::

        trainer = Trainer(
            model, args, train_dataset=data, callbacks=[CheckFreqCallback("chk/")]
        )
        trainer.train()

    ``train()`` restores the newest checkpoint by itself: weights, optimizer, scheduler, scaler,
    random generators, ``trainer.state``, the losses not yet logged, callbacks with a ``state()``,
    and the place in the data. A killed run ends with the bits of one that never stopped, and
    uses each sample of an epoch once. A boundary, at which a checkpoint may be taken, comes after
    each update and what follows it: logging, evaluation, and the Trainer's own checkpoint, which
    stays as it is (``save_strategy="no"`` goes without).

    The Trainer's train loader is replaced by ours, over the same dataset, collator and workers: the
    order of the samples is our permutation of (seed, epoch). The random generators of training are
    kept from evaluations.

    Arguments
        chk_dir: the directory of this run alone, or a URL, see ``CFManager``.
        seed: of the order of the samples. Default: ``args.data_seed``, else torch's initial seed,
            which is ``args.seed``. A restored run keeps its own.
        order: a function (seed, epoch) -> sample ids, in place of a sampler of your own.
        track: names and objects to checkpoint beside the Trainer's, see ``CFCheckpoint``.
        settled, volatile, per_rank: see ``CFCheckpoint``. The names are "model", "optimizer",
            "scheduler", "scaler", "trainer", "trainer_rank" and those in ``track``.
        manager_options: any other argument of ``CFManager``: ``max_overhead``, ``retention``,
            ``config`` and so on.

    Raises ConfigError, when training begins, for what cannot be resumed exactly: DeepSpeed, FSDP1,
    TPUs, tensor and sequence parallelism, optimizers that step during backward,
    ``auto_find_batch_size``, ``resume_from_checkpoint``; and ``NotResumableError`` for a loader
    with a sampler of its own.
    """

    def __init__(
        self,
        chk_dir: str | os.PathLike[str],
        *,
        seed: int | None = None,
        order: OrderFunction | None = None,
        track: Mapping[str, Any] | None = None,
        settled: Iterable[str] = (),
        volatile: Iterable[str] = (),
        per_rank: Iterable[str] = (),
        **manager_options: Any,
    ) -> None:
        self._options = Options(
            chk_dir,
            seed=seed,
            order=order,
            track=dict(track or {}),
            settled=tuple(settled),
            volatile=tuple(volatile),
            per_rank=tuple(per_rank),
            manager=manager_options,
        )
        self._loop: TrainingLoop | None = None
        self._attempts = 0

    @property
    def manager(self) -> CFManager | None:
        """The manager of the latest ``train()``, for ``save`` and ``stats``; None before it."""
        return None if self._loop is None else self._loop.manager

    def attach(self, trainer: Trainer) -> None:
        """Take part in the training of ``trainer``, where ``add_callback`` was used.

        ``Trainer(callbacks=[...])`` does it. Idempotent. Raises ConfigError for a second trainer,
        and for a version of transformers whose loop is not known.
        """
        if self._loop is None:
            self._loop = TrainingLoop(trainer, self, self._options)
        elif self._loop.trainer is not trainer:
            raise ConfigError(
                "CheckFreqCallback: one callback belongs to one Trainer, found a second; make "
                "another callback, with a directory of its own"
            )

    # ---- what the Trainer tells

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer is made: find out which one."""
        trainer = _trainer_that_calls(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to train without checkpoints."""
        if self._loop is None:
            raise ConfigError(
                "CheckFreqCallback was added after the Trainer was made, and training has begun: "
                "expected Trainer(callbacks=[CheckFreqCallback(...)]), or attach(trainer) before "
                "train()"
            )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An update is about to be made; the optimizer's hook has it wait for the copy."""
        if (manager := self.manager) is not None:
            self._attempts = manager.update_attempts

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count an update that reached no hook: one that the GradScaler skipped."""
        manager = self.manager
        if manager is not None and manager.update_attempts == self._attempts:
            with manager.updating():
                pass


def _trainer_that_calls(callback: TrainerCallback) -> Trainer | None:
    """The Trainer whose constructor is running: its events do not tell which one it is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    return None
