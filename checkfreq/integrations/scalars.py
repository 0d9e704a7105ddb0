"""Weights & Biases and MLflow as ``CFConfig.summary_writer``: what TensorBoard would be sent.

Neither is imported: you pass the run, or the client, that your script has. Both hand values to a
thread or process of their own, so that training does not wait for a network.
"""

from __future__ import annotations

from typing import Any, Protocol

_STEP = "checkfreq/step"


class WandbRun(Protocol):
    """The part of ``wandb.Run`` that is used."""

    def define_metric(self, name: str, *, step_metric: str | None = None) -> Any:
        """Say which metric is the x axis of another."""

    def log(self, data: dict[str, Any], *, commit: bool | None = None) -> None:
        """Log values."""


class MlflowClient(Protocol):
    """The part of ``mlflow.MlflowClient`` that is used."""

    def log_metric(
        self, run_id: str, key: str, value: float, *, step: int, synchronous: bool
    ) -> Any:
        """Log a value."""


class WandbScalars:
    """For ``run = wandb.init(...)``: ``CFConfig(summary_writer=WandbScalars(run))``.

    The values have an x axis of their own, ``checkfreq/step``, and go out with the next
    ``run.log`` of the script: they never take one of W&B's own steps.
    """

    def __init__(self, run: WandbRun) -> None:
        self._run = run
        run.define_metric(_STEP)
        run.define_metric("checkfreq/*", step_metric=_STEP)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """See `checkfreq.config.ScalarWriter`."""
        self._run.log({tag: scalar_value, _STEP: global_step}, commit=False)


class MlflowScalars:
    """For an active run: ``MlflowScalars(mlflow.MlflowClient(), run.info.run_id)``."""

    def __init__(self, client: MlflowClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """See `checkfreq.config.ScalarWriter`."""
        self._client.log_metric(
            self._run_id, tag, scalar_value, step=global_step, synchronous=False
        )
