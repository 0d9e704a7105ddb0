"""What an ``Accelerator`` was given to prepare, as a ``CFCheckpoint``. Training thread only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator

from checkfreq.errors import ConfigError
from checkfreq.integrations.accelerate.strategies import require_exact
from checkfreq.state.checkpoint import CFCheckpoint


class _Counter:
    """Batches since gradients were used last, by which ``accumulate`` counts."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """As of now."""
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue to count."""
        self._accelerator.step = state["step"]


def checkpoint_of(accelerator: Accelerator, **arguments: Any) -> CFCheckpoint:
    """A ``CFCheckpoint`` of everything that ``accelerator`` has prepared so far.

    The names are "model", "optimizer", "scheduler", then "model_1" and so on for further ones, in
    the order in which they were prepared; "scaler"; "registered", "registered_1" for what
    ``register_for_checkpointing`` was given; and "accelerator", its count for accumulation.
    ``arguments`` are those of ``CFCheckpoint``: more objects by name, ``per_rank=`` and so on.

    Raises ConfigError if nothing was prepared, and for a strategy that cannot be resumed exactly.
    """
    require_exact(accelerator, "checkpoint_of")
    tracked = dict(_prepared(accelerator))
    if "model" not in tracked:
        raise ConfigError(
            "checkpoint_of: expected an Accelerator that has prepared the model and the optimizer, "
            "found none; call it after accelerator.prepare(model, optimizer)"
        )
    if both := sorted({*tracked} & {*arguments}):
        raise ConfigError(
            f"checkpoint_of: {', '.join(both)} names what the accelerator has prepared; expected "
            "names of your own"
        )
    return CFCheckpoint(**tracked, **arguments)


def _prepared(accelerator: Any) -> Iterator[tuple[str, Any]]:
    kinds = {
        "model": accelerator._models,
        "optimizer": accelerator._optimizers,
        "scheduler": accelerator._schedulers,
        "registered": accelerator._custom_objects,
    }
    for kind, objects in kinds.items():
        for number, one in enumerate(objects):
            yield f"{kind}_{number}" if number else kind, one
    if accelerator.scaler is not None:
        yield "scaler", accelerator.scaler
    yield "accelerator", _Counter(accelerator)
