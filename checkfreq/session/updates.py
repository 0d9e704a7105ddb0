"""``weight_update``: which optimizer to step, through which wrapper or GradScaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from checkfreq.errors import ConfigError
from checkfreq.session.session import Session
from checkfreq.state.wrappers import was_skipped

Closure: TypeAlias = Callable[[], Any]


class WeightUpdates:
    """Steps the tracked optimizers. The fence itself is a pre-hook of theirs (`UpdateGate`)."""

    def __init__(self, session: Session) -> None:
        self._chk = session.chk
        # Found once: a walk over what is tracked is too much for every iteration.
        self._optimizers = session.chk.optimizers
        self._steppers = session.chk.steppers
        self._gate = session.gate
        self._gradients = session.pipeline.gradients

    def update(
        self,
        optimizer: torch.optim.Optimizer | str | None,
        scaler: torch.amp.GradScaler | None,
        closure: Closure | None,
    ) -> Any:
        """See `CFManager.weight_update`."""
        names = self._targets(optimizer, scaler)
        if scaler is None:
            return self._step(names[0], closure)
        if closure is not None:
            raise ConfigError("weight_update: a GradScaler cannot step with a closure; pass one")
        if not any(tracked is scaler for tracked in self._chk.tracked.values()):
            raise ConfigError(
                "weight_update: the scaler is not tracked, so its scale would be lost on a "
                "restore; pass it to CFCheckpoint(scaler=...)"
            )
        for name in names:
            scaler.step(self._optimizers[name])
            self._gradients.used(name)
        self._gate.count()
        scaler.update()
        return None

    def _step(self, name: str, closure: Closure | None) -> Any:
        """Step one optimizer, through its wrapper if it has one: that may skip, or scale."""
        optimizer = self._steppers[name]
        loss = optimizer.step(closure) if closure is not None else optimizer.step()
        if optimizer is not self._optimizers[name] and was_skipped(optimizer):
            self._gradients.used(name)
            self._gate.count()
        return loss

    def _targets(
        self,
        optimizer: torch.optim.Optimizer | str | None,
        scaler: torch.amp.GradScaler | None,
    ) -> list[str]:
        tracked = self._steppers
        if optimizer is None and len(tracked) == 1:
            return list(tracked)
        names = ", ".join(tracked) or "none"
        if optimizer is None:
            if tracked and scaler is not None:
                return list(tracked)
            raise ConfigError(
                f"weight_update: expected one tracked optimizer or the name of one, found: {names}"
            )
        for name, given in tracked.items():
            if optimizer is given or optimizer is self._optimizers[name] or optimizer == name:
                return [name]
        raise ConfigError(f"weight_update: that optimizer is not tracked; tracked: {names}")
