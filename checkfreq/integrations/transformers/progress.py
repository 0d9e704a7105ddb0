"""What a ``Trainer`` counts, as two objects that are checkpointed. Training thread only.

These are the attributes of the Trainer that its own checkpoints keep or recompute: its
``TrainerState``, the losses that were not logged yet, floating-point operations, the flags of its
``TrainerControl``, and the callbacks that have a state. What is the same on all ranks is one
object; the other holds what each rank has for itself, such as its losses, and a log with times.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState, TrainerControl

logger = logging.getLogger(__name__)

#: Fields of ``TrainerState`` that follow from the arguments or the process: a resumed run makes
#: them again.
_MADE_AGAIN = frozenset(
    (
        *("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps"),
        *("train_batch_size", "is_local_process_zero", "is_world_process_zero"),
        *("is_hyper_param_search", "stateful_callbacks", "trial_name", "trial_params"),
    )
)
#: The one field that differs from rank to rank: evaluations log their own times.
_LOG = "log_history"
#: Attributes of the Trainer that its loop counts in, the same on all ranks.
_COUNTERS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")


class Part:
    """An object with a state, made of two functions."""

    def __init__(
        self, read: Callable[[], dict[str, Any]], load: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._read, self._load = read, load

    def state_dict(self) -> dict[str, Any]:
        """Its state, as of now."""
        return self._read()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue from a state."""
        self._load(state)


class Progress:
    """The counters of one Trainer. A restored state is put in place in two steps.

    ``trainer.state`` is set while it is restored; the rest by ``apply``, once ``train()`` and the
    other callbacks have set up theirs.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._started_s = time.monotonic()
        self._shared: Mapping[str, Any] | None = None
        self._own: Mapping[str, Any] | None = None
        #: Seconds that earlier processes of this run trained for.
        self.seconds_before = 0.0
        #: By callback, the arguments that the script gave it, and those that it has changed since.
        self._given = {id(one): copy.deepcopy(_args(one)) for one in self._callbacks()}
        self._changed: dict[int, set[str]] = {}
        #: What is the same on all ranks, and what each has for itself.
        self.shared = Part(self._read_shared, self._load_shared)
        self.own = Part(self._read_own, self._load_own)

    def is_over(self, max_steps: int) -> bool:
        """Whether training was over at the restored boundary, and still is with ``max_steps``."""
        if self._shared is None:
            return False
        reached: int = self._shared["state"]["global_step"]
        if reached >= max_steps:
            return True
        was_told: bool = self._shared["control"]["should_training_stop"]
        return was_told and reached < self._shared["max_steps"]

    def apply(self, control: TrainerControl) -> None:
        """Set what ``train()`` and the callbacks have just reset."""
        trainer = self._trainer
        if self._own is not None:
            trainer._tr_loss = self._own["loss"].to(trainer._tr_loss, copy=True)
            trainer.current_flos = self._own["flos"]
        if self._shared is not None:
            for name, value in self._shared["counters"].items():
                setattr(trainer, name, value)
            for name, value in self._shared["control"].items():
                if name != "should_training_stop":  # see ``is_over``
                    setattr(control, name, value)
            self._apply_callbacks(self._shared["callbacks"])

    # ---- the same on all ranks

    def _read_shared(self) -> dict[str, Any]:
        trainer, state = self._trainer, self._trainer.state
        names = (field.name for field in fields(state))
        return {
            "state": {n: getattr(state, n) for n in names if n not in _MADE_AGAIN and n != _LOG},
            "max_steps": state.max_steps,
            "counters": {name: getattr(trainer, name, 0) for name in _COUNTERS},
            "control": trainer.control.state()["args"],
            "callbacks": [self._callback(one) for one in self._callbacks()],
        }

    def _load_shared(self, state: Mapping[str, Any]) -> None:
        self._shared = state
        for name, value in state["state"].items():
            setattr(self._trainer.state, name, value)

    # ---- each rank's own

    def _read_own(self) -> dict[str, Any]:
        trainer = self._trainer
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "log": trainer.state.log_history,
            "loss": torch.zeros((), device="cpu") if loss is None else loss,
            "flos": trainer.current_flos,
            "seconds": self.seconds_before + time.monotonic() - self._started_s,
        }

    def _load_own(self, state: Mapping[str, Any]) -> None:
        self._own = state
        self.seconds_before = float(state["seconds"])
        self._trainer.state.log_history = state["log"]

    # ---- callbacks

    def _callback(self, callback: Any) -> list[Any]:
        """The class, the arguments, the names of those that it has changed, and the attributes."""
        args = _args(callback)
        given = self._given.setdefault(id(callback), copy.deepcopy(args))
        changed = self._changed.setdefault(id(callback), set())
        changed.update(name for name, value in args.items() if not _equal(value, given.get(name)))
        return [type(callback).__name__, args, sorted(changed), callback.state()["attributes"]]

    def _apply_callbacks(self, saved: list[Any]) -> None:
        """Each in place: the first of a class that was saved to the first that is there.

        Arguments that the callback has not changed stay as the script gives them, unless the
        Trainer was told ``restore_callback_states_from_checkpoint``.
        """
        live = self._callbacks()
        takes_all = self._trainer.args.restore_callback_states_from_checkpoint
        for name, args, changed, attributes in saved:
            found = next((one for one in live if type(one).__name__ == name), None)
            if found is None:
                logger.warning(
                    "the checkpoint has the state of a callback that this trainer lacks, which is "
                    "dropped: %s",
                    name,
                )
                continue
            live.remove(found)
            self._changed[id(found)] = {*changed}
            taken = _args(found).keys() & (args.keys() if takes_all else changed)
            _set_args(found, {argument: args[argument] for argument in taken})
            for attribute, value in attributes.items():
                setattr(found, attribute, value)

    def _callbacks(self) -> list[Any]:
        found = self._trainer.callback_handler.callbacks
        return [one for one in found if isinstance(one, ExportableState)]


def _args(callback: ExportableState) -> dict[str, Any]:
    args: dict[str, Any] = callback.state()["args"]
    return args


def _set_args(callback: ExportableState, args: Mapping[str, Any]) -> None:
    """Set attributes of the same names; where that is not enough, those of one made with them."""
    for name in args.keys() & vars(callback).keys():
        setattr(callback, name, args[name])
    if not all(_equal(_args(callback)[name], value) for name, value in args.items()):
        vars(callback).update(vars(type(callback)(**{**_args(callback), **args})))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        is_like = type(one) is type(other) and one.shape == other.shape
        return is_like and bool((one == other).all())
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # tensors or arrays in a list
        return False
