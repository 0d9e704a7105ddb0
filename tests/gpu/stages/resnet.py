"""ResNet-50 in channels last and fp16, with a GradScaler and dropout: three SIGKILLs, same bits.

python -m tests.gpu.stages.resnet [--dry]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from checkfreq.examples.imagenet.models import import_torchvision
from iterators import CFIterator
from tests.gpu.stages.resuming import (
    Losses,
    Stage,
    begin,
    claim_same_bits,
    digests,
    opened,
    part,
    restore,
    tick,
)

_CLASSES, _EPOCHS = 10, 3

try:  # here, so that the server has it
    _MODELS: Any = import_torchvision().models
except ImportError:
    _MODELS = None


class Images(Dataset[Any]):
    """Random images [3, size, size] with a class; the same one for the same index."""

    def __init__(self, count: int, size: int) -> None:
        self._count, self._size = count, size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self._size, self._size, generator=generator), index % _CLASSES


def main() -> None:
    """Print a claim for each part of the state."""
    stage = Stage.begin()
    with part("resnet") as folder:
        claim_same_bits(
            stage,
            train,
            folder,
            kills=(6, 9, 12) if stage.is_dry else (13, 29, 47),
            context=stage.processes("tests.gpu.stages.resnet"),
            model=_model(stage)[1],
        )


def train(stage: Stage, directory: str, kill: int) -> dict[str, str]:
    """Three epochs, or up to the kill."""
    begin()
    count, batch, size, workers = (16, 4, 32, 1) if stage.is_dry else (1280, 64, 224, 4)
    data = DataLoader(
        Images(count, size),
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context="fork",  # a server of its own would outlive a killed training
        pin_memory=not stage.is_dry,
    )
    model = _model(stage)[0].to(stage.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    # Grows soon, from a scale at which gradients overflow: some updates are skipped.
    scaler = torch.amp.GradScaler(stage.device.type, init_scale=2.0**24, growth_interval=4)
    losses = Losses(_EPOCHS * len(data), stage.device)
    tracked = {"model": model, "optimizer": optimizer, "scaler": scaler, "losses": losses}
    with opened(directory, 3, **tracked) as manager:
        batches = CFIterator(data, cf_manager=manager)
        restore(stage, manager, model)
        for _ in batches.epochs(_EPOCHS):
            for images, classes in batches:
                tick(manager, kill)
                images = images.to(
                    stage.device, memory_format=torch.channels_last, non_blocking=True
                )
                with torch.autocast(stage.device.type, dtype=torch.float16):
                    scores = model(images)
                    loss = nn.functional.cross_entropy(scores, classes.to(stage.device))
                scaler.scale(loss).backward()
                losses.note(manager, loss)
                manager.weight_update(scaler=scaler)
                optimizer.zero_grad()
        return digests(**tracked)


def _model(stage: Stage) -> tuple[nn.Module, str]:
    """ResNet-50, or a small relative of it; a small network of our own without torchvision."""
    if _MODELS is None:
        return _own(), "a small network: no torchvision"
    if stage.is_dry:
        block = _MODELS.resnet.Bottleneck
        model = _MODELS.ResNet(block, [1, 1, 1, 1], num_classes=_CLASSES, width_per_group=8)
        name = "a small ResNet"
    else:
        model, name = _MODELS.resnet50(num_classes=_CLASSES), "resnet50"
    model.fc = nn.Sequential(nn.Dropout(0.2), model.fc)
    return model, name


def _own() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(64, _CLASSES),
    )


if __name__ == "__main__":
    main()
