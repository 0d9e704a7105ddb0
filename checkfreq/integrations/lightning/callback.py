"""``CheckFreqCallback``: what happens at which hook of the trainer.

- ``setup``: refuse what cannot be exact; our source of training loaders takes the trainer's place.
- behind the last ``on_train_start`` hook (the strategy's): make the manager, restore. What hooks
  made or drew until then is overwritten, and the loop has not yet asked whether it is done.
- at each batch the loop asks for: a boundary, in ``CFIterator``.
- each optimizer's step: the fence, a pre-hook of the manager's.
- ``on_train_end``: the last boundary, durable when it returns.

Everything runs on the training thread.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from checkfreq.errors import ConfigError
from checkfreq.integrations.lightning.callbacks import OtherCallbacks
from checkfreq.integrations.lightning.loader import LoaderSource, fetch_exactly, source_of
from checkfreq.integrations.lightning.metrics import LoggedMetrics
from checkfreq.integrations.lightning.progress import LoopProgress
from checkfreq.integrations.lightning.refusals import require_exact
from checkfreq.manager import CFManager
from checkfreq.state.checkpoint import CFCheckpoint
from iterators.cf_iterator import CFIterator
from iterators.loop.isolation import isolated_rng

try:
    import lightning.pytorch as lightning
except ModuleNotFoundError:  # the same library, under its older name
    import pytorch_lightning as lightning

logger = logging.getLogger(__name__)


class CheckFreqCallback(lightning.Callback):  # type: ignore[misc]  # untyped where not installed
    """Checkpoints a ``Trainer.fit``, and continues a killed one in mid-epoch with the same bits.

    Arguments
        chk_dir: the directory of this run alone, as for ``CFManager``.
        seed: fixes the order of the training data, as for ``CFIterator``.
        track: further state by name, as for ``CFCheckpoint``. The model, its optimizers, schedulers
            and loss scale, the trainer's progress, the metrics logged so far and the other
            callbacks are tracked already.
        settings: every other argument of ``CFManager`` (``mode``, ``max_overhead``, ``retention``,
            ``config``...).

    Starting the same script again resumes; ``fit(ckpt_path=...)`` only counts while the directory
    holds no checkpoint. Samples come in ``CFIterator``'s order, not in the sampler's: the loader is
    rebuilt, split among the ranks too. Validation leaves the random generators of training alone.

    Raises ConfigError, before training starts, for a strategy, setting or callback that cannot be
    exact, and NotResumableError for such a loader. With ``fast_dev_run`` and ``overfit_batches`` it
    does nothing, and says so.
    """

    def __init__(
        self,
        chk_dir: str | os.PathLike[str],
        *,
        seed: int | None = None,
        track: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        inspect.signature(CFManager).bind(chk_dir, None, **settings)  # TypeError for a wrong name
        self._chk_dir, self._seed, self._settings = chk_dir, seed, settings
        self._track = dict(track or {})
        self._source: LoaderSource | None = None
        self._manager: CFManager | None = None
        self._batches: CFIterator | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckFreqCallback:
        """The same callback, outside of training: a run has one."""
        other = copy.copy(self)
        other._source = other._manager = other._batches = None
        return other

    @property
    def manager(self) -> CFManager:
        """The manager of the run; ConfigError before training starts and after it ended."""
        if self._manager is None:
            raise ConfigError(
                "CheckFreqCallback.manager: expected while the trainer trains (from the first "
                "batch to on_train_end), found no training. Use checkfreq.load() elsewhere"
            )
        return self._manager

    @property
    def batches(self) -> CFIterator:
        """The iterator over the training data, with the samples of the last batch; as above."""
        assert self.manager is not None
        assert self._batches is not None
        return self._batches

    # ---- hooks

    def setup(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        """Refuse what cannot be exact, and take the training loader's place."""
        if stage != "fit":
            return
        for name in ("fast_dev_run", "overfit_batches"):
            if getattr(trainer, name):
                logger.warning("CheckFreqCallback: nothing is checkpointed with %s", name)
                return
        require_exact(trainer, pl_module, self)
        self._source = source_of(trainer, seed=self._seed)

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Have the restore follow the last of these hooks, which is the strategy's."""
        if self._source is None:
            return
        strategy: Any = trainer.strategy
        hook = strategy.on_train_start

        def then_begin() -> None:
            del strategy.on_train_start
            hook()
            self._begin(trainer, pl_module)

        strategy.on_train_start = then_begin

    def on_train_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Pass the last boundary, and wait until it is durable."""
        if self._manager is None or self._batches is None:
            return
        iter(self._batches)  # Lightning has ended the epoch, also one it left early
        manager = self._manager
        self._release(trainer)
        manager.close()

    def on_exception(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        """Finish what is in flight; a run that was told to stop has its checkpoint already."""
        manager = self._manager
        self._release(trainer)
        if manager is not None:
            manager.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str
    ) -> None:
        """Give the trainer back its own source, if training never came to its end."""
        manager = self._manager
        self._release(trainer)
        if manager is not None:
            manager.close()

    # ---- what they do

    def _begin(self, trainer: Any, module: Any) -> None:
        loader = None if self._source is None else self._source.given
        if loader is None:  # limit_train_batches=0
            return
        progress = LoopProgress(trainer, module)
        chk = CFCheckpoint(
            per_rank=("callbacks", "metrics"),
            **_trained(trainer),
            trainer=progress,
            callbacks=OtherCallbacks(trainer, module, self, version=_version()),
            metrics=LoggedMetrics(trainer, module),
            **self._track,
        )
        self._manager = manager = CFManager(self._chk_dir, chk, **self._settings)
        self._batches = batches = CFIterator(loader.adapter, cf_manager=manager)
        manager.restore()
        if not progress.is_in_epoch:
            # A whole epoch begins: what its hooks draw must not be taken back at its first batch.
            next(batches.epochs(sys.maxsize), None)
        loader.attach(batches, before_first=progress.reach_batch)
        if loader.adapter.num_batches() is None:
            fetch_exactly(trainer, batches)
        _isolate_validation(trainer.fit_loop.epoch_loop.val_loop)

    def _release(self, trainer: Any) -> None:
        """Undo what was put into the trainer; idempotent."""
        if self._source is not None:
            if self._source.given is not None:
                self._source.given.detach()
            trainer.fit_loop._data_source = self._source.source
            vars(trainer.fit_loop.epoch_loop.val_loop).pop("run", None)
        self._source = self._manager = self._batches = None


def _trained(trainer: Any) -> dict[str, Any]:
    """The objects that train, by name: those of torch."""
    plugin = trainer.precision_plugin
    scaler = getattr(plugin, "scaler", None)
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    found = {
        "model": trainer.strategy.model,
        **_numbered("optimizer", trainer.optimizers),
        **_numbered("scheduler", schedulers),
    }
    if scaler is not None:
        found["scaler"] = scaler
    elif plugin.state_dict():
        found["precision"] = plugin
    return found


def _version() -> str:
    version: str = sys.modules[lightning.Callback.__module__.partition(".")[0]].__version__
    return version


def _numbered(name: str, objects: list[Any]) -> dict[str, Any]:
    if len(objects) == 1:
        return {name: objects[0]}
    return {f"{name}_{number}": one for number, one in enumerate(objects)}


def _isolate_validation(val_loop: Any) -> None:
    """Have validation leave the random generators of training alone.

    Its loader draws when it is made, and workers that persist are started in its first run only:
    that is another one in a resumed process.
    """
    run = val_loop.run

    def isolated(*args: Any, **kwargs: Any) -> Any:
        with isolated_rng():
            return run(*args, **kwargs)

    val_loop.run = isolated
