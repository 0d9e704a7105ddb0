"""Tiny Lightning runs that report all they do."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from checkfreq import CFConfig, CFMode
from checkfreq.integrations.lightning import CheckFreqCallback
from iterators.testing import digest
from tests.acceptance.ranks import Rank

NUM_SAMPLES, FEATURES = 28, 6

#: Is told what happened, after how many boundaries, and the bits to compare; first what was
#: "restored", at last that all is "done".
Report: TypeAlias = Callable[[str, int, Any], None]


class Samples(Dataset[tuple[int, Tensor]]):
    """Each sample is augmented anew, by torch's global generator."""

    def __init__(self, noise: float = 0.1) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        clean = torch.linspace(-1.0, 1.0, FEATURES) * (number + 1) / NUM_SAMPLES
        return number, clean + self._noise * torch.randn(FEATURES)


class Stream(IterableDataset[tuple[int, Tensor]]):
    """The same without a length."""

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        samples = Samples()
        return (samples[number] for number in range(NUM_SAMPLES))


class Net(lightning.LightningModule):
    """Batch norm, dropout, a metric over the epoch, and state that only hooks know."""

    def __init__(self, **schedule: Any) -> None:
        super().__init__()
        layers = (nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.layers = nn.Sequential(*layers)
        self.seen = MeanMetric()
        self.drawn = 0.0
        self._schedule = schedule

    def forward(self, x: Tensor) -> Tensor:
        """x [N, FEATURES] -> [N, 1]."""
        out: Tensor = self.layers(x)
        return out

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean squared error of a batch."""
        _, x = batch
        return (self(x) - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.seen(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        drawn = 0.01 * torch.rand(()) if self.automatic_optimization else 0.0
        self.log("val_loss", self.loss_of(batch) + drawn, sync_dist=True)

    def on_train_epoch_start(self) -> None:
        self.drawn += torch.rand(()).item()
        if self.trainer.world_size == 1:
            self.layers[0].weight.requires_grad_(self.current_epoch != 1)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["drawn"] = self.drawn

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.drawn = checkpoint["drawn"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if not self._schedule:
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
        steps = {"scheduler": cosine, "interval": "step"}
        return [optimizer], [steps, {"scheduler": plateau, **self._schedule}]


class TwoPlayers(Net):
    """Manual optimization: two optimizers, one of which steps on every second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        own, critics = self.optimizers()
        loss = self.loss_of(batch) - 0.1 * self.critic(self(batch[1])).mean()
        own.zero_grad()
        self.manual_backward(loss)
        own.step()
        worth = self.critic(self(batch[1]).detach()).square().mean()
        self.manual_backward(worth / 2)
        if batch_idx % 2:
            critics.step()
            critics.zero_grad()
            self.lr_schedulers().step()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        own = torch.optim.SGD(self.layers.parameters(), lr=0.01, momentum=0.9)
        critics = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        return [own, critics], [torch.optim.lr_scheduler.StepLR(critics, 3, 0.5)]


def _best(folder: Path, **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "best", enable_version_counter=False, **settings)


@dataclass(frozen=True)
class Case:
    """A run: its module, its callbacks, and the trainer's settings."""

    module: Callable[[], Net]
    callbacks: Callable[[Path], list[Callback]] = lambda folder: []
    trainer: dict[str, Any] = field(default_factory=dict)
    dataset: Callable[[], Any] = Samples
    loader: dict[str, Any] = field(default_factory=dict)
    val_loader: dict[str, Any] = field(default_factory=dict)
    plugins: Callable[[], Any] = lambda: None
    world: int = 1


def _averages() -> list[Callback]:
    """Averaged weights, which Lightning has since 2.6."""
    try:
        from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
    except ImportError:
        return []
    return [EMAWeightAveraging(decay=0.9)]


CASES = {
    "automatic": Case(
        lambda: Net(monitor="val_loss", interval="step", frequency=4, strict=False),
        lambda folder: [
            _best(folder, monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping("loss_epoch", patience=50, check_on_train_epoch_end=True),
        ],
        {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_epochs": 3},
    ),
    "manual": Case(
        TwoPlayers,
        lambda folder: [_best(folder, monitor="loss", every_n_train_steps=3, save_top_k=1)],
        {"max_epochs": 3, "val_check_interval": 0.5},
        loader={"num_workers": 1},
        val_loader={"num_workers": 1, "persistent_workers": True},
    ),
    "averaged": Case(
        lambda: Net(monitor="loss_epoch", interval="epoch"),
        lambda folder: [
            *_averages(),
            GradientAccumulationScheduler({0: 1, 1: 3}),
            EarlyStopping("val_loss", patience=1, min_delta=10.0),
        ],
        {"max_epochs": 9, "limit_train_batches": 6, "check_val_every_n_epoch": 2},
        plugins=lambda: MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")),
    ),
    "stream": Case(Net, trainer={"max_steps": 18, "accumulate_grad_batches": 3}, dataset=Stream),
}
CASES["ranks"] = replace(CASES["automatic"], world=2)


class Recorder(Callback):
    """Tells ``report`` what happens."""

    def __init__(self, ours: CheckFreqCallback, report: Report) -> None:
        self._ours, self._report = ours, report
        self._has_begun = False

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        manager, ids = self._ours.manager, self._ours.batches.last_ids
        if not self._has_begun:
            self._has_begun = True
            self._report("restored", manager.stats()["restored_step"] or 0, None)
        if manager.global_step - (manager.stats()["last_durable_step"] or 0) > 2:
            manager.wait()
        assert ids is None or ids.tolist() == batch[0].tolist()
        self._tell("batch", trainer, (batch[0].tolist(), batch_idx, digest(batch[1])))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tell("loss", trainer, (digest(outputs["loss"]), trainer.global_step))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._tell("validated", trainer, metrics_of(trainer))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._tell("epoch", trainer, metrics_of(trainer))

    def _tell(self, kind: str, trainer: Any, data: object) -> None:
        place = (trainer.current_epoch, trainer.fit_loop.batch_idx)
        self._report(kind, self._ours.manager.global_step, (place, data))


def live(here: Rank) -> None:
    """One life of a case on a rank."""
    here.send("begun", here.rank)
    if here.world > 1:
        ranks = {"RANK": here.rank, "LOCAL_RANK": here.rank, "WORLD_SIZE": here.world}
        ranks |= {"LOCAL_WORLD_SIZE": here.world, "GROUP_RANK": 0, "MASTER_PORT": 29500}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "kills"})

    def report(kind: str, step: int, data: Any) -> None:
        if kind == "restored":
            here.send("restored", step)
        elif kind == "done":
            here.send("end", data)
        else:
            here.send("event", kind, step, data)

    config = CFConfig(verify_settled=True, **here.settings.get("config", {}))
    train(here.settings["case"], here.life.folder, report, seed=here.life.seed, config=config)


def train(
    name: str,
    folder: Path,
    report: Report,
    *,
    seed: int,
    config: CFConfig | None = None,
    **more: Any,
) -> None:
    """One life of a run: from its last checkpoint to its end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    case = CASES[name]
    module = case.module()
    ours = CheckFreqCallback(
        folder / "chk",
        seed=5,
        mode=CFMode.MANUAL,
        chk_freq=1,
        config=config or CFConfig(verify_settled=True),
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=case.world,
        strategy=DDPStrategy(process_group_backend="gloo") if case.world > 1 else "auto",
        callbacks=[ours, *case.callbacks(folder), Recorder(ours, report)],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=any(
            isinstance(one, ModelCheckpoint) for one in case.callbacks(folder)
        ),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        plugins=case.plugins(),
        **{**case.trainer, **more},
    )
    size = 4 // case.world
    shuffle = case.dataset is Samples
    loader = DataLoader(case.dataset(), size, shuffle=shuffle, **case.loader)
    # Workers that persist draw on from one validation to the next: that no process can repeat.
    noise = 0.0 if case.val_loader else 0.1
    validation = DataLoader(Samples(noise), size, **case.val_loader)
    trainer.fit(module, loader, validation)
    report("done", trainer.global_step, everything(trainer, module, folder))


def everything(trainer: Any, module: Net, folder: Path) -> dict[str, str]:
    """All that a run is, at its end."""
    state = module.state_dict()
    # Where a run is over when it is restored, no forward pass makes other ranks' buffers equal.
    owned = state if trainer.is_global_zero else dict(module.named_parameters())
    callbacks = {
        one.state_key: one.state_dict()
        for one in trainer.callbacks
        if not isinstance(one, Recorder | CheckFreqCallback)
    }
    return {
        "model": digest([state[name] for name in state if name in owned]),
        "optimizers": digest([one.state_dict() for one in trainer.optimizers]),
        "schedulers": digest([c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]),
        "callbacks": repr(callbacks).replace(str(folder), "."),
        "metrics": repr(metrics_of(trainer)),
        "loops": repr(trainer.fit_loop.state_dict()),
        "generators": digest([torch.get_rng_state(), random.getstate(), np.random.get_state()]),
        "hooks": repr(module.drawn),
        "precision": repr(trainer.precision_plugin.state_dict()),
    }


def metrics_of(trainer: Any) -> dict[str, str]:
    """All that is monitored, to the bit."""
    return {name: one.item().hex() for name, one in sorted(trainer.callback_metrics.items())}
