"""Weights & Biases and MLflow through ``CFConfig.summary_writer``, without either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkfreq import CFConfig
from checkfreq.integrations.scalars import MlflowScalars, WandbScalars
from tests.contract.runs import Training, managed


class Run:
    """What `WandbScalars` uses of a ``wandb.Run``."""

    def __init__(self) -> None:
        self.axes: dict[str, str | None] = {}
        self.logged: list[tuple[dict[str, Any], bool | None]] = []

    def define_metric(self, name: str, *, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any], *, commit: bool | None = None) -> None:
        self.logged.append((data, commit))


class Client:
    """What `MlflowScalars` uses of an ``mlflow.MlflowClient``."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, str, float, int, bool]] = []

    def log_metric(
        self, run_id: str, key: str, value: float, *, step: int, synchronous: bool
    ) -> None:
        self.logged.append((run_id, key, value, step, synchronous))


def train(chk_dir: Path, writer: Any) -> None:
    training = Training()
    config = CFConfig(summary_writer=writer)
    with managed(chk_dir, training.chk, chk_freq=2, config=config) as manager:
        training.steps(manager, 2)
        manager.wait()


def test_wandb_gets_each_value_with_an_axis_of_its_own(tmp_path: Path) -> None:
    run = Run()
    train(tmp_path / "chk", WandbScalars(run))
    assert run.axes == {"checkfreq/step": None, "checkfreq/*": "checkfreq/step"}
    stall = [data for data, _ in run.logged if "checkfreq/stall_s" in data]
    assert [data["checkfreq/step"] for data in stall] == [2]
    assert {commit for _, commit in run.logged} == {False}  # no step of the script's is taken


def test_mlflow_gets_each_value_without_being_waited_for(tmp_path: Path) -> None:
    client = Client()
    train(tmp_path / "chk", MlflowScalars(client, "run-1"))
    stall = [one for one in client.logged if one[1] == "checkfreq/stall_s"]
    assert [(one[0], *one[3:]) for one in stall] == [("run-1", 2, False)]
