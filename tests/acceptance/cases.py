"""What people train, in small: each case is one kind of state that a resume could get wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from checkfreq import CFManager
from iterators import isolated_rng

CASES: dict[str, type[Case]] = {}


def case(kind: type[Case]) -> type[Case]:
    """Have the suite run this case."""
    CASES[kind.__name__] = kind
    return kind


class Pictures(Dataset[tuple[Tensor, int]]):
    """``[3, 8, 8]`` pictures of four classes, augmented with all three global generators."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self._pictures = torch.rand(num_samples, 3, 8, 8, generator=generator)

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        picture = self._pictures[index] + index % 4
        if random.random() < 0.5:
            picture = picture.flip(-1)
        brightness = float(np.random.uniform(0.8, 1.2))
        return picture * brightness + 0.1 * torch.randn(3, 8, 8), index % 4


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Random crops of a text of 32 tokens, and the token after each place."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(4)
        self._texts = torch.randint(0, 32, (num_samples, 16), generator=generator)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = random.randrange(8)
        text = self._texts[index, start : start + 9]
        return text[:-1], text[1:]


class Case:
    """One training script: how to build it, take one batch, and end an epoch."""

    epochs = 3
    total_steps: int | None = None  # given: no epochs, so many steps
    batch_size = 8
    num_samples = 108  # the last batch of an epoch is a short one
    workers = 0
    persistent_workers = False
    accumulate: int | None = None
    chk_freq = 2
    max_lag = 6  # steps that may be at stake before the trainer waits for the disk
    last_batch: int | None = None  # leave the epoch after so many batches
    settled: tuple[str, ...] = ()
    volatile: tuple[str, ...] = ()
    warns: str | None = None  # a warning of torch's own that is none of our business
    data: Callable[[int], Dataset[Any]] = Pictures
    folder: Path  # for files of its data

    def dataset(self) -> Dataset[Any]:
        return type(self).data(self.num_samples)

    def loader(self) -> Any:
        """What ``CFIterator`` takes."""
        return DataLoader(
            self.dataset(),
            batch_size=self.batch_size,
            shuffle=not isinstance(self.dataset(), IterableDataset),
            num_workers=self.workers,
            persistent_workers=self.workers > 0 and self.persistent_workers,
        )

    def tracked(self) -> dict[str, Any]:
        raise NotImplementedError

    def begin_epoch(self, epoch: int) -> None:
        pass

    def learn(self, cf: CFManager, batch: Any) -> object:
        """Use one batch; returns the loss, or whatever else shows that bits are the same."""
        raise NotImplementedError

    def tail(self, cf: CFManager, epoch: int) -> None:
        pass


class Supervised(Case):
    """One model and one optimizer."""

    def __init__(self) -> None:
        self.model = self.make_model()
        self.optimizer = self.make_optimizer()

    def make_model(self) -> nn.Module:
        return small_resnet()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def tracked(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def loss(self, batch: Any) -> Tensor:
        pictures, labels = batch
        return F.cross_entropy(self.model(pictures), labels)

    def learn(self, cf: CFManager, batch: Any) -> object:
        loss = self.loss(batch)
        loss.backward()
        self.update(cf)
        return loss.item().hex()

    def update(self, cf: CFManager) -> None:
        cf.weight_update()
        self.optimizer.zero_grad()


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels, momentum=None),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


def small_resnet() -> nn.Sequential:
    """Convolutions, BatchNorm of both kinds (running, cumulative) and dropout of both kinds."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(8),
        Block(8),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, 4),
    )


# ---- optimizers and schedulers


@case
class SgdMomentumEpochScheduler(Supervised):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "scheduler": self.scheduler}

    def tail(self, cf: CFManager, epoch: int) -> None:
        self.scheduler.step()


@case
class AdamWWarmUpPerStepTwoWorkers(Supervised):
    workers = 2
    chk_freq = 3

    def __init__(self) -> None:
        super().__init__()
        schedulers = torch.optim.lr_scheduler
        self.scheduler = schedulers.SequentialLR(
            self.optimizer,
            [
                schedulers.LinearLR(self.optimizer, 0.1, total_iters=9),
                schedulers.CosineAnnealingLR(self.optimizer, 33),
            ],
            milestones=[9],
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "scheduler": self.scheduler}

    def update(self, cf: CFManager) -> None:
        super().update(cf)
        self.scheduler.step()


@case
class PlateauAndBestModelFromValidation(Supervised):
    """Validation draws random numbers, keeps the best loss and asks for a checkpoint."""

    chk_freq = 1

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.optimizer, patience=0, threshold=0.5
        )
        self.progress: dict[str, Any] = {"best": float("inf"), "losses": [], "sum": 0.0}
        self.held_out = DataLoader(Pictures(20), batch_size=10, shuffle=True)

    def tracked(self) -> dict[str, Any]:
        tracked = super().tracked()
        return {**tracked, "scheduler": self.scheduler, "progress": self.progress}

    def learn(self, cf: CFManager, batch: Any) -> object:
        loss = super().learn(cf, batch)
        self.progress["sum"] += float.fromhex(str(loss))
        return loss

    def tail(self, cf: CFManager, epoch: int) -> None:
        self.model.eval()
        with torch.no_grad():
            loss = sum(self.loss(batch).item() for batch in self.held_out)
        self.model.train()
        self.scheduler.step(loss)
        self.progress["losses"].append((epoch, loss, self.progress["sum"]))
        self.progress["sum"] = 0.0
        if loss < self.progress["best"]:
            self.progress["best"] = loss
            cf.save(keep=True, metrics={"loss": loss})


@case
class LbfgsWithClosure(Supervised):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(
            self.model.parameters(),
            lr=0.1,
            max_iter=3,
            history_size=4,
            line_search_fn="strong_wolfe",
        )

    def learn(self, cf: CFManager, batch: Any) -> object:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        return cf.weight_update(closure=closure).item().hex()


def _heads() -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    optim = torch.optim
    return {
        "adagrad": lambda p: optim.Adagrad(p, lr=0.02),
        "adadelta": optim.Adadelta,
        "adamax": optim.Adamax,
        "adafactor": optim.Adafactor,
        "asgd": lambda p: optim.ASGD(p, lr=0.02, t0=5),
        "fused_adamw": lambda p: optim.AdamW(p, lr=0.01, fused=True),
        "muon": lambda p: optim.Muon([x for x in p if x.ndim == 2]),
        "nadam": lambda p: optim.NAdam(p, decoupled_weight_decay=True),
        "radam": optim.RAdam,
        "rmsprop": lambda p: optim.RMSprop(p, centered=True, momentum=0.5),
        "rprop": optim.Rprop,
        "tensor_lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    }


@case
class EveryOtherOptimizer(Case):
    """Twelve linear heads, each with an optimizer of its own."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict({name: nn.Linear(192, 4) for name in _heads()})
        self.optimizers = {
            name: make(list(self.model[name].parameters())) for name, make in _heads().items()
        }

    def tracked(self) -> dict[str, Any]:
        return {"model": self.model, **self.optimizers}

    def learn(self, cf: CFManager, batch: Any) -> object:
        pictures, labels = batch
        total = 0.0
        for name, optimizer in self.optimizers.items():
            loss = F.cross_entropy(self.model[name](pictures.flatten(1)), labels)
            loss.backward()
            cf.weight_update(name)
            optimizer.zero_grad()
            total += loss.item()
        return total.hex()


def _schedulers() -> dict[str, Callable[[torch.optim.Optimizer], Any]]:
    s = torch.optim.lr_scheduler
    return {
        "one_cycle": lambda o: s.OneCycleLR(o, 0.1, total_steps=60),
        "cyclic": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=5, mode="exp_range", gamma=0.99),
        "restarts": lambda o: s.CosineAnnealingWarmRestarts(o, 7),
        "chained": lambda o: s.ChainedScheduler(
            [s.ConstantLR(o, 0.5, 6), s.ExponentialLR(o, 0.97)], optimizer=o
        ),
        "function": lambda o: s.LambdaLR(o, lambda step: 1.0 / (1 + step)),
        "factor": lambda o: s.MultiplicativeLR(o, lambda step: 0.98),
        "polynomial": lambda o: s.PolynomialLR(o, 50, power=2.0),
        "milestones": lambda o: s.MultiStepLR(o, [5, 20, 30]),
    }


@case
class EveryOtherScheduler(Case):
    """Eight linear heads, each with a schedule of its own."""

    def __init__(self) -> None:
        names = list(_schedulers())
        self.model = nn.ModuleDict({name: nn.Linear(192, 4) for name in names})
        self.optimizers = {
            name: torch.optim.SGD(self.model[name].parameters(), lr=0.05, momentum=0.9)
            for name in names
        }
        self.schedulers = {n: make(self.optimizers[n]) for n, make in _schedulers().items()}

    def tracked(self) -> dict[str, Any]:
        schedulers = {f"{name}_scheduler": value for name, value in self.schedulers.items()}
        return {"model": self.model, **self.optimizers, **schedulers}

    def learn(self, cf: CFManager, batch: Any) -> object:
        pictures, labels = batch
        total = 0.0
        for name, optimizer in self.optimizers.items():
            loss = F.cross_entropy(self.model[name](pictures.flatten(1)), labels)
            loss.backward()
            cf.weight_update(optimizer)
            optimizer.zero_grad()
            self.schedulers[name].step()
            total += loss.item()
        return total.hex()


class MasterSGD(torch.optim.SGD):
    """Keeps float32 copies of its bfloat16 parameters in its state."""

    def step(self, closure: Any = None) -> None:
        assert closure is None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._step(parameter, group["lr"])

    def _step(self, parameter: Tensor, lr: float) -> None:
        state = self.state[parameter]
        if not state:
            state["master"] = parameter.float()
            state["updates"] = 0
        state["master"].sub_(parameter.grad.float(), alpha=lr)
        state["updates"] += 1
        parameter.copy_(state["master"])


class Bfloat16(Supervised):
    def make_model(self) -> nn.Module:
        return small_resnet().bfloat16()

    def loss(self, batch: Any) -> Tensor:
        pictures, labels = batch
        return F.cross_entropy(self.model(pictures.bfloat16()).float(), labels)


@case
class Bfloat16AdamW(Bfloat16):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)


@case
class Bfloat16WithFloat32StateInTheOptimizer(Bfloat16):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return MasterSGD(self.model.parameters(), lr=0.05)


@case
class GradScalerThatSkipsSteps(Supervised):
    """Every fifth loss overflows: the scale falls, the step is skipped, the boundary counts."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "scaler": self.scaler}

    def learn(self, cf: CFManager, batch: Any) -> object:
        pictures, labels = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(pictures), labels)
        if int(labels.sum()) % 5 == 0:
            loss = loss * torch.inf
        self.scaler.scale(loss).backward()
        cf.weight_update(scaler=self.scaler)
        self.optimizer.zero_grad()
        return loss.item().hex(), self.scaler.get_scale()


@case
class OptimizerSteppedDirectly(Supervised):
    def update(self, cf: CFManager) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


@case
class UpdateThatWouldOvertakeTheCopy(Supervised):
    """16 MB of weights and momentum, and next to nothing to do between two updates."""

    chk_freq = 1
    num_samples = 60

    def make_model(self) -> nn.Module:
        self.weights = nn.Parameter(torch.randn(2_000_000))
        return nn.ParameterDict({"weights": self.weights})

    def learn(self, cf: CFManager, batch: Any) -> object:
        self.weights.grad = torch.cos(self.weights.detach()[:1]).expand_as(self.weights)
        cf.weight_update()
        return self.weights.sum().item().hex()


@case
class TwoOptimizersOfAGan(Case):
    """The critic's weights are clipped; noise is drawn on every step."""

    def __init__(self) -> None:
        self.maker = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 192)
        )
        self.critic = nn.Sequential(
            nn.Linear(192, 64), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(64, 1)
        )
        self.maker_steps = torch.optim.Adam(self.maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.critic_steps = torch.optim.RMSprop(self.critic.parameters(), lr=1e-3)

    def tracked(self) -> dict[str, Any]:
        names = ("maker", "critic", "maker_steps", "critic_steps")
        return {name: getattr(self, name) for name in names}

    def learn(self, cf: CFManager, batch: Any) -> object:
        real = batch[0].flatten(1)
        made = self.maker(torch.randn(len(real), 16))
        critic_loss = self.critic(made.detach()).mean() - self.critic(real).mean()
        self.critic_steps.zero_grad()
        critic_loss.backward()
        cf.weight_update("critic_steps")
        with cf.updating(), torch.no_grad():
            for parameter in self.critic.parameters():
                parameter.clamp_(-0.1, 0.1)
        maker_loss = -self.critic(self.maker(torch.randn(len(real), 16))).mean()
        self.maker_steps.zero_grad()
        maker_loss.backward()
        cf.weight_update(self.maker_steps)
        return critic_loss.item().hex(), maker_loss.item().hex()


# ---- averages


class Averaged(Supervised):
    def __init__(self) -> None:
        super().__init__()
        swa = torch.optim.swa_utils
        self.ema = swa.AveragedModel(
            self.model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9), use_buffers=True
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "ema": self.ema}


@case
class ExponentialAverage(Averaged):
    def update(self, cf: CFManager) -> None:
        super().update(cf)
        self.ema.update_parameters(self.model)


@case
class ExponentialAverageDeclaredSettled(Averaged):
    settled = ("ema",)
    chk_freq = 1

    def update(self, cf: CFManager) -> None:
        super().update(cf)
        with cf.updating():
            self.ema.update_parameters(self.model)


# ---- boundaries


@case
class AccumulationOfThreeBatches(Supervised):
    """14 batches an epoch: the last group is a short one."""

    accumulate = 3
    chk_freq = 1

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def learn(self, cf: CFManager, batch: Any) -> object:
        loss = self.loss(batch) / 3
        loss.backward()
        self.batches += 1
        if self.batches % 3 == 0:
            self.update(cf)
        return loss.item().hex()

    def tail(self, cf: CFManager, epoch: int) -> None:
        if self.batches % 3:
            self.update(cf)
        self.batches = 0


@case
class AccumulationAcrossEpochs(Supervised):
    """The manager is told nothing; groups of four batches go over the epochs' ends."""

    epochs = 5
    chk_freq = 1
    workers = 2
    persistent_workers = True

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def learn(self, cf: CFManager, batch: Any) -> object:
        loss = self.loss(batch) / 4
        loss.backward()
        self.batches += 1
        if self.batches % 4 == 0:
            self.update(cf)
        return loss.item().hex()


@case
class GradientsCarriedOverBoundaries(Supervised):
    """``accumulate`` passes a boundary at each epoch's end, in the middle of a group.

    From then on the groups and the boundaries are out of step.
    """

    accumulate = 4
    chk_freq = 1

    def __init__(self) -> None:
        super().__init__()
        self.count = {"batches": 0}

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "count": self.count}

    def learn(self, cf: CFManager, batch: Any) -> object:
        loss = self.loss(batch) / 4
        loss.backward()
        self.count["batches"] += 1
        if self.count["batches"] % 4 == 0:
            self.update(cf)
        return loss.item().hex()


@case
class CheckpointsAtEpochBoundariesOnly(Supervised):
    chk_freq = 0
    max_lag = 16


@case
class CheckpointsAskedForBeforeTheUpdate(Supervised):
    """``save`` between the forward pass and the update means the next boundary."""

    chk_freq = 0
    max_lag = 16

    def learn(self, cf: CFManager, batch: Any) -> object:
        loss = self.loss(batch)
        cf.save()
        loss.backward()
        self.update(cf)
        return loss.item().hex()


@case
class EpochsLeftEarly(Supervised):
    last_batch = 11
    chk_freq = 1

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)


@case
class StepsAcrossEpochs(Supervised):
    total_steps = 40
    workers = 2
    persistent_workers = True


@case
class EpochsThatBeginWithRandomNumbers(Supervised):
    """As where a script draws this epoch's learning rate or crop before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = 0.0

    def begin_epoch(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(epoch)
        self.strength = float(torch.rand(1, generator=generator))
        torch.randn(5)

    def loss(self, batch: Any) -> Tensor:
        pictures, labels = batch
        return super().loss((pictures + self.strength * torch.randn_like(pictures), labels))


@case
class ValidationByWorkersThatPersist(Supervised):
    """They draw from torch's generator when they start: once more in every resumed process."""

    num_samples = 36

    def __init__(self) -> None:
        super().__init__()
        self.validation = DataLoader(Pictures(8), 4, num_workers=1, persistent_workers=True)

    def tail(self, cf: CFManager, epoch: int) -> None:
        with isolated_rng():
            self.model.eval()
            for pictures, _ in self.validation:
                self.model(pictures)
            self.model.train()


# ---- models


@case
class ChannelsLast(Supervised):
    def make_model(self) -> nn.Module:
        return small_resnet().to(memory_format=torch.channels_last)

    def loss(self, batch: Any) -> Tensor:
        pictures, labels = batch
        return super().loss((pictures.contiguous(memory_format=torch.channels_last), labels))


class Language(Supervised):
    data = Sentences

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def loss(self, batch: Any) -> Tensor:
        text, following = batch
        return F.cross_entropy(self.model(text).flatten(0, 1), following.flatten())


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.mix = nn.LSTM(16, 16, batch_first=True, num_layers=2, dropout=0.1)
        self.out = nn.Linear(16, 32, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.out(self.mix(self.embedding(text))[0])
        return scores


@case
class TiedWeights(Language):
    def make_model(self) -> nn.Module:
        return TiedModel()


@case
class EmbeddingWithMaxNorm(Language):
    """The forward pass rescales the rows that it looks up."""

    chk_freq = 1

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(32, 16, max_norm=0.5), nn.Dropout(0.1), nn.Linear(16, 32))


@case
class SparseEmbedding(Language):
    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(32, 16, sparse=True), nn.Linear(16, 32))

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.sparse = torch.optim.SparseAdam(self.model[0].parameters(), lr=0.01)
        return torch.optim.AdamW(self.model[1].parameters(), lr=0.01)

    def tracked(self) -> dict[str, Any]:
        return {**super().tracked(), "sparse": self.sparse}

    def update(self, cf: CFManager) -> None:
        cf.weight_update("sparse")
        cf.weight_update("optimizer")
        self.model.zero_grad()


@case
class FrozenLayersThatThawInTheSecondEpoch(Supervised):
    """So their optimizer state does not exist before."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def begin_epoch(self, epoch: int) -> None:
        self.model[0].requires_grad_(False)
        self.model[3].requires_grad_(epoch >= 1)
        self.model[1].eval()


@case
class SpectralNorm(Supervised):
    """Power iteration changes buffers in every forward pass."""

    def make_model(self) -> nn.Module:
        parametrizations = nn.utils.parametrizations
        model = small_resnet()
        parametrizations.spectral_norm(model[0])
        parametrizations.weight_norm(model[-1])
        return model


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small_resnet()[:5]
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 4))

    def forward(self, x: Tensor) -> Tensor:
        run = torch.utils.checkpoint.checkpoint
        x = run(self.body, x, use_reentrant=False)
        scores: Tensor = run(self.head, x, use_reentrant=False)
        return scores


@case
class ActivationCheckpointingWithDropout(Supervised):
    def make_model(self) -> nn.Module:
        return Recomputed()


@case
class MixUpFromPythonAndNumPy(Supervised):
    """The loop itself draws from all three generators; NumPy's and Python's keep a spare normal."""

    def loss(self, batch: Any) -> Tensor:
        pictures, labels = batch
        share = float(np.random.beta(0.4, 0.4)) + 1e-3 * np.random.standard_normal()
        share += 1e-3 * random.gauss(0.0, 1.0)
        order = torch.randperm(len(labels))
        scores = self.model(share * pictures + (1 - share) * pictures[order])
        one, other = F.cross_entropy(scores, labels), F.cross_entropy(scores, labels[order])
        return share * one + (1 - share) * other


class Stream(IterableDataset[tuple[Tensor, int]]):
    """Pictures in a row, shared among the workers, with a state of its own."""

    def __init__(self, num_samples: int) -> None:
        self._pictures = Pictures(num_samples)
        self._next = 0

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[Tensor, int]:
        info = get_worker_info()
        worker, step = (0, 1) if info is None else (info.id, info.num_workers)
        index = self._next * step + worker
        if index >= len(self._pictures):
            raise StopIteration
        self._next += 1
        return self._pictures[index]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


@case
class IterableDatasetOfTwoWorkers(Supervised):
    workers = 2
    data = Stream


@case
class DaliPictures(Supervised):
    """Files that DALI reads, decodes, crops and flips, in our order."""

    num_samples = 36

    def loader(self) -> Any:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        from iterators.dali import FileReader

        self.folder.mkdir(exist_ok=True)
        generator = np.random.default_rng(0)
        files = [str(self.folder / f"{index}.raw") for index in range(self.num_samples)]
        for file in files:
            generator.integers(0, 256, (3, 8, 8), dtype=np.uint8).tofile(file)
        outputs = ("label", "uniforms", "id", "weight")
        reader = FileReader(files=files, num_uniforms=1, outputs=outputs)

        def define() -> Any:
            data, label, uniforms, ids, weight = reader()
            pictures = fn.cast(fn.reshape(data, shape=[3, 8, 8]), dtype=types.FLOAT) / 255.0
            return pictures + uniforms[0], label, ids, weight

        pipeline = pipeline_def(define, batch_size=4, num_threads=1, device_id=None)()
        return DALIGenericIterator(pipeline, ["data", "label", "id", "weight"])

    def loss(self, batch: Any) -> Tensor:
        pictures = batch[0]["data"]
        return F.cross_entropy(self.model(pictures), torch.arange(len(pictures)) % 4)


@case
class CompiledModel(Supervised):
    """Batches of one size: a graph with symbolic sizes takes five times as long to compile."""

    batch_size = 9
    warns = "The .grad attribute of a Tensor that is not a leaf"

    def make_model(self) -> nn.Module:
        model = nn.Sequential(*small_resnet()[:3], nn.Dropout(0.2), nn.Flatten(), nn.Linear(512, 4))
        return torch.compile(model, backend="aot_eager", dynamic=False)


@case
class DistributedDataParallelOfOneRank(Supervised):
    def make_model(self) -> nn.Module:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        return nn.parallel.DistributedDataParallel(small_resnet())


@case
class TorchvisionResNet18(Supervised):
    """90 MB of state: larger than the slots that are made ready at once."""

    num_samples = 36

    def make_model(self) -> nn.Module:
        from checkfreq.examples.imagenet.models import build

        return build("resnet18", num_classes=4)
