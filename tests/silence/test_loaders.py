"""Loaders that killed runs continue exactly, without a word: samplers, datasets with generators."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    TensorDataset,
)

from tests.silence.training import digest, learning, trained, tried


class NamedOtherwise(BatchSampler):
    """torch's, under another name."""


class OwnGenerators(Dataset[Any]):
    """Augments with generators of its own, as Albumentations does."""

    def __init__(self) -> None:
        self.x = torch.randn(64, 8)
        self.numpy, self.python = np.random.default_rng(3), random.Random(4)
        self.torch = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(8, generator=self.torch) + self.numpy.normal() + self.python.random()
        return self.x[index] + noise.float(), self.x[index, :3].argmax()


def pictures() -> TensorDataset:
    x = torch.randn(64, 8)
    return TensorDataset(x, x[:, :3].argmax(1))


def named_otherwise() -> DataLoader[Any]:
    dataset = pictures()
    batches = NamedOtherwise(RandomSampler(dataset, replacement=True), 8, False)
    return DataLoader(dataset, batch_sampler=batches)


def own_generators_in_workers() -> DataLoader[Any]:
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
    return DataLoader(OwnGenerators(), 8, shuffle=True, **workers)


def train(directory: str, kill: int, *, make: Callable[[], DataLoader[Any]]) -> str:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    update = learning(model, optimizer)
    trained(directory, kill, make(), update, epochs=2, model=model, optimizer=optimizer)
    return digest(model)


@pytest.mark.parametrize("make", [named_otherwise, own_generators_in_workers])
def test_a_killed_run_goes_on_exactly_without_a_word(make: Any, tmp_path: Path) -> None:
    trial = tried(partial(train, make=make), tmp_path)
    assert trial.is_exact
    assert not trial.warnings
    assert any("restored step" in text for text in trial.resumed.infos)
