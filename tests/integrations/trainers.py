"""Runs of Hugging Face's ``Trainer`` as users write them, with reports of what they do."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from checkfreq import CFConfig, CFMode
from checkfreq.errors import ConfigError
from checkfreq.integrations.transformers import CheckFreqCallback
from iterators import NotResumableError
from iterators.testing import digest
from tests.acceptance.ranks import Rank
from tests.integrations.learning import Bag, Language, Sentences


class Reporting(Trainer):
    """Tells the test of each batch and its loss."""

    here: Rank

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """See Trainer."""
        ids = inputs["input_ids"][:, 0].tolist()
        loss = super().training_step(model, inputs, num_items_in_batch)
        place = (round(self.state.epoch, 9), self.current_gradient_accumulation_steps)
        self.here.send("event", "batch", self.state.global_step, (ids, place, loss.item()))
        return loss


class Reports(TrainerCallback):
    """Tells the test of what else happens."""

    def __init__(self, here: Rank, checkfreq: CheckFreqCallback) -> None:
        self._here, self._checkfreq = here, checkfreq

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        manager = self._checkfreq.manager
        assert manager is not None
        self._here.send("restored", manager.stats()["restored_step"] or 0)

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any, **_: Any) -> None:
        """See TrainerCallback."""
        rate = lr_scheduler.get_last_lr()
        self._here.send("event", "update", state.global_step, (state.epoch, rate))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        """See TrainerCallback."""
        found = (metrics["eval_loss"], state.best_metric)
        self._here.send("event", "evaluation", state.global_step, found)


CASES: dict[str, dict[str, Any]] = {
    # Epochs, accumulation with a short last group, evaluation inside the epoch, own checkpoints.
    "epochs": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 5,
        "num_train_epochs": 4,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "eval_on_start": True,
        "save_strategy": "steps",
        "save_steps": 3,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "logging_steps": 2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "patience": 5,
    },
    # Steps that end within an epoch, worker processes, evaluation after epochs, no checkpoints.
    "steps": {
        "model": "bag",
        "per_device_train_batch_size": 6,
        "max_steps": 28,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "logging_steps": 3,
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.0,
    },
}
# More updates, for several ranks.
CASES["ranks"] = {**CASES["epochs"], "gradient_accumulation_steps": 2, "num_train_epochs": 5}


def train(here: Rank) -> None:
    """One life of a case."""
    warnings.simplefilter("default")  # the libraries' own are no business of ours
    here.send("begun", here.rank)
    if here.world > 1:
        ranks = {"RANK": here.rank, "LOCAL_RANK": here.rank, "WORLD_SIZE": here.world}
        os.environ.update({n: str(v) for n, v in {**ranks, "LOCAL_WORLD_SIZE": here.world}.items()})
    settings = dict(CASES[here.settings["case"]])
    model, patience = settings.pop("model", "language"), settings.pop("patience", None)
    args = TrainingArguments(
        output_dir=str(here.life.folder / "own"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=11 + here.life.seed,
        learning_rate=0.01,
        include_num_input_tokens_seen="all",
        **settings,
    )
    checkfreq = CheckFreqCallback(
        here.chk_dir,
        mode=CFMode.MANUAL,
        chk_freq=1,
        config=CFConfig(verify_settled=True, **here.settings.get("config", {})),
    )
    early = [] if patience is None else [EarlyStoppingCallback(patience)]
    trainer = Reporting(
        Language() if model == "language" else Bag(),
        args,
        train_dataset=Sentences(),
        eval_dataset=Sentences(9, is_random=False),
        callbacks=[checkfreq, *early, Reports(here, checkfreq)],
    )
    trainer.here = here
    result = trainer.train()
    here.send("end", _everything(trainer, result.training_loss, early))


def _everything(trainer: Trainer, loss: float, early: list[EarlyStoppingCallback]) -> Any:
    """All that training leaves behind, but times."""
    state = dataclasses.asdict(trainer.state)
    timed = ("runtime", "per_second")
    log = [
        {name: value for name, value in one.items() if not name.endswith(timed)}
        for one in state.pop("log_history")
    ]
    state.pop("stateful_callbacks")
    state["best_model_checkpoint"] = str(state["best_model_checkpoint"]).rpartition("/")[2]
    return {
        "model": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()["state"]),
        "scheduler": digest(trainer.lr_scheduler.state_dict()),
        "generators": digest(
            [torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)]
        ),
        "loss": loss,
        "state": state,
        "log": log,
        "patience": [one.early_stopping_patience_counter for one in early],
    }


def refuse(here: Rank) -> None:
    """Report with what a Trainer refuses to train, and that it trains on without the callback."""
    warnings.simplefilter("default")
    given: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "resume_from_checkpoint": ({}, {"resume_from_checkpoint": "own"}),
        "auto_find_batch_size": ({"auto_find_batch_size": True}, {}),
        "ignore_data_skip": ({"ignore_data_skip": True}, {}),
        "a sampler of its own": ({"train_sampling_strategy": "group_by_length"}, {}),
        "loader": ({"dataloader_in_order": False, "dataloader_num_workers": 1}, {}),
    }
    for what, (settings, arguments) in given.items():
        checkfreq = CheckFreqCallback(here.life.folder / what)
        _report_refusal(here, what, _small(here, [checkfreq], **settings), **arguments)
    callback = CheckFreqCallback(here.life.folder / "late")
    trainer = _small(here, [])
    trainer.add_callback(callback)
    _report_refusal(here, "added late", trainer)
    callback.attach(trainer)
    trainer.train()
    manager = callback.manager
    here.send("attached", manager.stats()["last_durable_step"] if manager else None)
    try:
        callback.attach(_small(here, []))
    except ConfigError as error:
        here.send("refused", "a second Trainer", type(error).__name__, str(error))


class Scale(TrainerCallback, ExportableState):
    """Changes one of its arguments, and an attribute."""

    def __init__(self, scale: float = 1.0, factor: float = 0.5) -> None:
        self.scale, self.factor, self.count = scale, factor, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """See TrainerCallback."""
        self.scale *= self.factor
        self.count += 1

    def state(self) -> dict[str, Any]:
        """See ExportableState."""
        args = {"scale": self.scale, "factor": self.factor}
        return {"args": args, "attributes": {"count": self.count}}


class Lacking(Scale):
    """Is not there in a later start."""


def keep(here: Rank) -> None:
    """Report with the state of a callback after 2, 3 and 4 steps, each in objects of their own.

    The script gives another factor each time, and the second time one callback less.
    """
    warnings.simplefilter("default")
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("checkfreq").addHandler(handler)

    def train(steps: int, *callbacks: Scale, **settings: Any) -> None:
        checkfreq = CheckFreqCallback(here.life.folder / "kept", mode=CFMode.MANUAL, chk_freq=1)
        _small(here, [*callbacks, checkfreq], max_steps=steps, **settings).train()
        here.send("state", steps, callbacks[0].state())

    train(2, Scale(), Lacking())
    train(3, Scale(factor=0.25))
    train(4, Scale(), restore_callback_states_from_checkpoint=True)
    here.send("heard", heard)


def _small(here: Rank, callbacks: list[Any], **settings: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(here.life.folder / "own"),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        **{"max_steps": 2, **settings},
    )
    return Trainer(Bag(), args, train_dataset=Sentences(), callbacks=callbacks)


def _report_refusal(here: Rank, what: str, trainer: Trainer, **arguments: Any) -> None:
    try:
        trainer.train(**arguments)
    except (ConfigError, NotResumableError) as error:
        here.send("refused", what, type(error).__name__, str(error))
