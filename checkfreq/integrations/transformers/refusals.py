"""What a ``Trainer`` may be told to do that cannot be resumed exactly. Training thread only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from checkfreq.errors import ConfigError
from checkfreq.integrations.accelerate import strategies

_WHO = "CheckFreqCallback"


def require_exact(trainer: Any, *, resumed_from: Any, trial: Any) -> None:
    """ConfigError with the reason if ``trainer.train()`` cannot be exact."""
    strategies.require_exact(trainer.accelerator, _WHO)
    for found, reason in _found(trainer, resumed_from=resumed_from, trial=trial):
        raise ConfigError(f"{_WHO}: {found} cannot be resumed bit for bit: {reason}")


def _found(trainer: Any, *, resumed_from: Any, trial: Any) -> Iterator[tuple[str, str]]:
    args, config = trainer.args, trainer.args.accelerator_config
    if resumed_from:
        yield (
            f"resume_from_checkpoint={resumed_from!r}",
            "two checkpoints would decide where to continue. Leave it out: train() continues from "
            "the newest in the callback's directory. For the weights of another run alone, load "
            "them into the model",
        )
    if trial is not None:
        yield (
            "hyperparameter_search",
            "its trials share the Trainer and the callback's directory. Remove the callback",
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True",
            "it starts the epoch again with another batch size, which depends on the memory that "
            "is free at the moment. Set per_device_train_batch_size to the size that it found",
        )
    if args.ignore_data_skip:
        yield "ignore_data_skip=True", "it uses samples of the epoch twice. Leave it out"
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer or "layerwise" in optimizer:
        yield (
            f"optim={optimizer!r}",
            "it updates weights during backward, before the copy of a snapshot may be complete. "
            "Use an optimizer that updates in step()",
        )
    if max(trainer.get_tp_size(), trainer.get_cp_size(), trainer.get_sp_size()) > 1:
        yield (
            "tensor, context or sequence parallelism",
            "ranks of one group would need the same batches, and our loader gives each rank its "
            "own. Use DDP or FSDP2",
        )
    if args.world_size > 1 and (config.split_batches or config.dispatch_batches):
        yield (
            "split_batches or dispatch_batches in accelerator_config",
            "our loader gives each rank whole batches that it reads itself. Leave them out",
        )
