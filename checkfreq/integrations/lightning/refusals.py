"""What cannot be resumed with the same bits, and is refused with the reason before training starts.

Lightning's classes are told by their names: ``lightning`` and ``pytorch_lightning`` each have their
own, and none has to be imported for this.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from checkfreq.errors import ConfigError

#: Strategies under which the loop, the optimizers and their hooks are torch's own.
_EXACT = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")

_STRATEGIES = {
    "DeepSpeedStrategy": (
        "DeepSpeed's engine updates the weights itself, past every hook of the optimizer, and "
        "keeps its state in its own format",
        "DDP, or ModelParallelStrategy for sharded models",
    ),
    "FSDPStrategy": (
        "FSDP1 keeps parameters in flat pieces that are freed between uses",
        "ModelParallelStrategy, which uses fully_shard (FSDP2)",
    ),
    "XLAStrategy": (
        "the memory of XLA's tensors (TPUs) cannot be read while training goes on",
        "CPU, CUDA or ROCm devices",
    ),
    "XLAFSDPStrategy": (
        "the memory of XLA's tensors (TPUs) cannot be read while training goes on",
        "CPU, CUDA or ROCm devices",
    ),
    "SingleDeviceXLAStrategy": (
        "the memory of XLA's tensors (TPUs) cannot be read while training goes on",
        "CPU, CUDA or ROCm devices",
    ),
}

_CALLBACKS = {
    "BaseFinetuning": "adds parameter groups in the midst of training, which a new process lacks "
    "when it restores; freeze by requires_grad in the module's hooks instead",
    "StochasticWeightAveraging": "replaces the schedulers and prolongs the loop in the midst of "
    "training; use WeightAveraging instead",
    "CheckFreqCallback": "is there twice; give one directory to one callback",
}


def require_exact(trainer: Any, module: Any, own: object) -> None:
    """Raise ConfigError with the reasons if ``trainer`` cannot be resumed exactly."""
    reasons = [
        *_of_strategy(trainer.strategy),
        *_of_settings(trainer),
        *_of_callbacks(trainer.callbacks, own),
        *_of_module(module),
    ]
    if reasons:
        raise ConfigError(
            "CheckFreqCallback: this run could not be resumed with the same bits: "
            + "; ".join(reasons)
        )


def _of_strategy(strategy: Any) -> Iterator[str]:
    name = type(strategy).__name__
    bases = [kind.__name__ for kind in type(strategy).__mro__]
    for known, (reason, instead) in _STRATEGIES.items():
        if known in bases:
            yield f"under {name}, {reason} (use {instead})"
            return
    if not any(base in _EXACT for base in bases):
        yield f"the strategy {name} is not known to be exact (use one of {', '.join(_EXACT)})"
    if getattr(strategy, "_ddp_comm_state", None) is not None:
        yield (
            f"{name}(ddp_comm_state=...) keeps errors and averages that are in no state dict (use "
            "no communication hook with a state)"
        )


def _of_settings(trainer: Any) -> Iterator[str]:
    if trainer.reload_dataloaders_every_n_epochs:
        yield (
            "with reload_dataloaders_every_n_epochs the place in the data belongs to a loader that "
            "is thrown away (use a dataset that changes by epoch)"
        )


def _of_callbacks(callbacks: list[Any], own: object) -> Iterator[str]:
    for callback in callbacks:
        for kind in type(callback).__mro__:
            if kind.__name__ in _CALLBACKS and callback is not own:
                yield f"{type(callback).__name__} {_CALLBACKS[kind.__name__]}"


def _of_module(module: Any) -> Iterator[str]:
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        yield (
            "training_step(dataloader_iter) fetches batches in the midst of a step (take batch and "
            "batch_idx)"
        )


def require_no_second_loader(loaders: list[Any]) -> None:
    """Raise ConfigError if training reads several loaders."""
    if len(loaders) > 1:
        raise ConfigError(
            f"CheckFreqCallback: training reads {len(loaders)} loaders, and Lightning cycles "
            "through the shorter ones in an order that is in no state: expected one. Combine the "
            "datasets (torch.utils.data.StackDataset, ConcatDataset), or draw the second batch "
            "inside training_step from an iterator of your own"
        )
