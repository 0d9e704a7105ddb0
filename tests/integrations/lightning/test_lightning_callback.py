"""What the callback refuses, what it leaves alone, and how runs begin and end with it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.more,
    pytest.mark.filterwarnings("ignore"),  # Lightning's, about tiny runs
]

lightning = pytest.importorskip("lightning")

import torch  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    StochasticWeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from checkfreq.errors import ConfigError  # noqa: E402
from checkfreq.integrations.lightning import CheckFreqCallback  # noqa: E402
from checkfreq.store.store import CheckpointStore  # noqa: E402
from tests.integrations.lightning.program import Net, Samples, train  # noqa: E402


def trainer_of(
    *callbacks: Any, folder: Path, kind: Any = lightning.Trainer, **settings: Any
) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return kind(
        accelerator="cpu",
        devices=1,
        callbacks=[*callbacks],
        default_root_dir=folder,
        enable_checkpointing=False,
        **{"max_epochs": 1, **quiet, **settings},
    )


def loader() -> DataLoader[Any]:
    return DataLoader(Samples(), 4)


@pytest.mark.parametrize(
    ("settings", "callback", "reason"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, None, "a loader that is thrown away"),
        ({}, lambda folder: StochasticWeightAveraging(0.1), "replaces the schedulers"),
        ({}, lambda folder: CheckFreqCallback(folder / "b"), "is there twice"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_the_reason(
    settings: dict[str, Any],
    callback: Callable[[Path], Any] | None,
    reason: str,
    tmp_path: Path,
) -> None:
    others = [] if callback is None else [callback(tmp_path)]
    trainer = trainer_of(CheckFreqCallback(tmp_path / "a"), *others, folder=tmp_path, **settings)
    with pytest.raises(ConfigError, match=f"the same bits: .*{reason}"):
        trainer.fit(Net(), loader())
    assert not (tmp_path / "a").exists()


def test_a_trial_of_a_few_batches_checkpoints_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(CheckFreqCallback(tmp_path / "chk"), folder=tmp_path, fast_dev_run=1)
    trainer.fit(Net(), loader(), loader())
    assert not (tmp_path / "chk").exists()
    assert "nothing is checkpointed with fast_dev_run" in caplog.text


class Reads(BoringModel):  # type: ignore[misc]
    """Reads the whole checkpoint in its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 3})
        self.saved: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saved = dict(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = dict(checkpoint)
        with pytest.raises(KeyError, match="'optimizer_states' is not in .*expected one of"):
            checkpoint["optimizer_states"]


def test_hooks_get_what_lightning_documents(tmp_path: Path) -> None:
    def fit(steps: int) -> Reads:
        model, ours = Reads(), CheckFreqCallback(tmp_path / "chk")
        trainer_of(ours, folder=tmp_path, max_steps=steps, max_epochs=2).fit(model)
        return model

    first, then = fit(3), fit(5)
    own = trainer_of(folder=tmp_path, max_steps=3)
    own.fit(BoringModel())
    documented = {*own._checkpoint_connector.dump_checkpoint(), "hyper_parameters"}
    assert documented <= first.saved.keys()
    assert documented - {"optimizer_states"} <= then.loaded.keys()
    for name in ("epoch", "global_step", "loops", "lr_schedulers", "callbacks", "hyper_parameters"):
        assert then.loaded[name] == first.saved[name], name
    for name, tensor in first.saved["state_dict"].items():
        assert then.loaded["state_dict"][name].shape == tensor.shape
        assert then.loaded["state_dict"][name].is_meta


def test_fsdp1_is_refused_by_name(tmp_path: Path) -> None:
    from checkfreq.integrations.lightning.refusals import require_exact

    trainer = trainer_of(folder=tmp_path)
    trainer._accelerator_connector.strategy = FSDPStrategy()
    with pytest.raises(
        ConfigError, match="under FSDPStrategy, FSDP1 keeps .*ModelParallelStrategy"
    ):
        require_exact(trainer, Net(), None)


class Copies(lightning.Callback):  # type: ignore[misc]
    """Copies the loop, and continues a copy's data on its own."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        copy.deepcopy(trainer.fit_loop)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        other = copy.deepcopy(trainer.fit_loop)
        next(iter(other._combined_loader))


def test_a_copy_of_the_loop_takes_no_part_in_the_run(tmp_path: Path) -> None:
    ours = CheckFreqCallback(tmp_path / "chk")
    trainer = trainer_of(Copies(), ours, folder=tmp_path, max_steps=3)
    trainer.fit(BoringModel())
    assert CheckpointStore(tmp_path / "chk").steps()[-1] == 3


def test_a_run_that_is_over_trains_no_further_and_a_longer_one_goes_on(tmp_path: Path) -> None:
    def told(folder: Path, **settings: Any) -> list[Any]:
        events: list[Any] = []
        train("manual", folder, lambda *event: events.append(event), seed=0, **settings)
        return [event for event in events if event[0] != "restored"]

    whole = told(tmp_path / "whole")
    first = told(tmp_path / "twice", max_epochs=1)
    assert told(tmp_path / "twice", max_epochs=1) == first[-1:]
    assert first[:-1] + told(tmp_path / "twice") == whole


def test_a_checkpoint_of_lightning_s_counts_until_there_is_one_of_ours(tmp_path: Path) -> None:
    first = trainer_of(folder=tmp_path)
    first.fit(Net(), loader())
    first.save_checkpoint(tmp_path / "theirs.ckpt")
    model = Net()
    trainer = trainer_of(CheckFreqCallback(tmp_path / "chk"), folder=tmp_path, max_epochs=2)
    trainer.fit(model, loader(), ckpt_path=tmp_path / "theirs.ckpt")
    assert trainer.global_step == 14
    again = trainer_of(CheckFreqCallback(tmp_path / "chk"), folder=tmp_path, max_epochs=2)
    other = Net()
    again.fit(other, loader(), ckpt_path=tmp_path / "theirs.ckpt")
    assert again.global_step == 14
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_the_older_name_of_the_library_works_too(tmp_path: Path) -> None:
    import pytorch_lightning
    from pytorch_lightning.demos.boring_classes import BoringModel

    if pytorch_lightning.__version__.startswith("2.5."):
        pytest.skip("before 2.6 it takes callbacks of its own base class alone")

    ours = CheckFreqCallback(tmp_path / "chk")
    trainer_of(ours, folder=tmp_path, kind=pytorch_lightning.Trainer, max_steps=3).fit(
        BoringModel()
    )
    assert CheckpointStore(tmp_path / "chk").steps()[-1] == 3
