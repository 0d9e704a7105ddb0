"""The state of the other callbacks, of the data module, and of what hooks add to a checkpoint.

Each rank keeps its own: a callback may count or time what only its rank does.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

logger = logging.getLogger(__name__)

#: What a ``ModelCheckpoint`` does not load from its state dict: whether it saved at this very step.
_MODEL_CHECKPOINT = ("_last_global_step_saved", "_last_checkpoint_saved", "current_score")


class HooksCheckpoint(dict[str, Any]):
    """The dictionary of hooks: what Lightning's own checkpoint of this boundary would hold."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(
            f"{key!r} is not in the checkpoint that on_save_checkpoint and on_load_checkpoint get "
            f"from CheckFreqCallback: expected one of {', '.join(sorted(self))}. It restores "
            "optimizers and the loss scale itself, and on_load_checkpoint gets none of them"
        )


class OtherCallbacks:
    """All callbacks of the trainer but ours, the module's hooks and the data module."""

    def __init__(self, trainer: Any, module: Any, own: object, *, version: str) -> None:
        self._trainer, self._module, self._own = trainer, module, own
        self._version = version

    def state_dict(self) -> dict[str, Any]:
        """The state on this rank."""
        states = {_key(one): state for one in self._others if (state := one.state_dict())}
        saved = {
            _key(one): {name: vars(one)[name] for name in _MODEL_CHECKPOINT}
            for one in self._others
            if all(name in vars(one) for name in _MODEL_CHECKPOINT)
        }
        state = {"states": states, "model_checkpoints": saved, "hooks": self._hooks(states)}
        if self._trainer.datamodule is not None:
            state["datamodule"] = self._trainer.datamodule.state_dict()
        return state

    def _hooks(self, states: dict[str, Any]) -> dict[str, Any]:
        """What ``on_save_checkpoint`` hooks add to a checkpoint, or replace in it."""
        hooked = [one for one in self._others if _has_hook(one, "on_save_checkpoint")]
        if not hooked and not _has_hook(self._module, "on_save_checkpoint"):
            return {}
        before = self._checkpoint(states)
        before["optimizer_states"] = [one.state_dict() for one in self._trainer.optimizers]
        checkpoint = HooksCheckpoint(before)
        for callback in hooked:
            callback.on_save_checkpoint(self._trainer, self._module, checkpoint)
        self._module.on_save_checkpoint(checkpoint)
        return {key: one for key, one in checkpoint.items() if before.get(key) is not one}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it into the callbacks that there are."""
        states = state["states"]
        live = {_key(one) for one in self._others}
        for name in states:
            if name not in live:
                logger.warning(
                    "the checkpoint has the state of a callback that this trainer lacks, which is "
                    "dropped: %s",
                    name,
                )
        self._load_hooks(states, state["hooks"])
        for callback in self._others:
            if found := states.get(_key(callback)):
                callback.load_state_dict(deepcopy(found))
            vars(callback).update(state["model_checkpoints"].get(_key(callback), {}))
        if "datamodule" in state and self._trainer.datamodule is not None:
            self._trainer.datamodule.load_state_dict(state["datamodule"])

    def _load_hooks(self, states: dict[str, Any], hooks: dict[str, Any]) -> None:
        checkpoint = HooksCheckpoint(self._checkpoint(deepcopy(states)))
        # The weights come last, when everything else fits: until then there are shapes.
        weights = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: _outline(one) for name, one in weights.items()}
        checkpoint.update(hooks)
        for callback in self._others:
            if _has_hook(callback, "on_load_checkpoint"):
                callback.on_load_checkpoint(self._trainer, self._module, checkpoint)
        if _has_hook(self._module, "on_load_checkpoint"):
            self._module.on_load_checkpoint(checkpoint)

    def _checkpoint(self, states: dict[str, Any]) -> dict[str, Any]:
        """What Lightning documents, but for the optimizers and the loss scale."""
        trainer, keys = self._trainer, {_key(one): one.state_key for one in self._others}
        return {
            "callbacks": {keys.get(name, name): state for name, state in states.items()},
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": self._version,
            "state_dict": self._module.state_dict(),
            "loops": trainer._checkpoint_connector._get_loops_state_dict(),
            "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
            **{
                one.CHECKPOINT_HYPER_PARAMS_KEY: dict(one.hparams)
                for one in (self._module, trainer.datamodule)
                if one is not None and one.hparams
            },
        }

    @property
    def _others(self) -> list[Any]:
        return [one for one in self._trainer.callbacks if one is not self._own]


def _key(callback: Any) -> str:
    """The name of its state: its ``state_key``, which may be a type."""
    return str(callback.state_key)


def _outline(value: Any) -> Any:
    is_plain = type(value) in (Tensor, nn.Parameter)
    return value.to("meta") if is_plain else value


def _has_hook(owner: Any, name: str) -> bool:
    """Whether a user's class, or one of Lightning's, defines the hook: the base's does nothing."""
    base = getattr(getattr(type(owner), name), "__qualname__", "")
    return base not in (f"Callback.{name}", f"CheckpointHooks.{name}")
