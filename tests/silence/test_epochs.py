"""Where an epoch ends: uneven groups, growing data, epochs that are cut short or counted anew."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, loss_of, tick, tried

Trained = tuple[nn.Module, torch.optim.Optimizer, CFManager]


def training(directory: str, **tracked: Any) -> Trained:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = CFCheckpoint(model=model, optimizer=optimizer, **tracked)
    return model, optimizer, CFManager(directory, checkpoint, **EVERY)


def update(trained: Trained, batches: list[Any], kill: int) -> None:
    """One update with the gradients of ``batches``, unless it is the one to be killed at."""
    model, optimizer, manager = trained
    tick(manager, manager.update_attempts + 1 == kill)
    for x, y in batches:
        loss_of(model, x, y).backward()
    manager.weight_update()
    optimizer.zero_grad()


def uneven(directory: str, kill: int) -> tuple[str, int]:
    trained = model, _, manager = training(directory)
    with manager:
        iterator = CFIterator(data(60, 4), cf_manager=manager, accumulate=2)
        manager.restore()
        batches = iter(iterator.steps(24))
        while manager.global_step + iterator.is_using_batch < 24:
            update(trained, [next(batches), next(batches)], kill)
    return digest(model), manager.global_step


def test_uneven(tmp_path: Path) -> None:
    trial = tried(uneven, tmp_path, kills=(8, 1))
    assert trial.whole.result[1] == 24
    assert trial.is_exact
    assert not trial.warnings


class Grown(Dataset[Any]):
    """As long as ``n`` says, which the script sets before each epoch."""

    def __init__(self) -> None:
        self.n = 64
        self.x = torch.randn(256, 8)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.x[index, :3].argmax()


def grow(directory: str, kill: int) -> tuple[str, int, list[int]]:
    lengths = {"of": [0, 0, 0]}
    trained = model, _, manager = training(directory, lengths=lengths)
    dataset = Grown()
    with manager:
        loader = DataLoader(dataset, batch_size=8, shuffle=True)
        iterator = CFIterator(loader, cf_manager=manager, audit=True)
        manager.restore()
        for epoch in iterator.epochs(3):
            dataset.n = (64, 128, 96)[epoch]
            lengths["of"][epoch] = len(iterator)
            for batch in iterator:
                update(trained, [batch], kill)
    return digest(model), manager.global_step, lengths["of"]


def test_grow(tmp_path: Path) -> None:
    trial = tried(grow, tmp_path, kills=(13, 12, 3))
    assert trial.whole.result[1:] == (36, [8, 16, 12])
    assert trial.is_exact
    assert not trial.warnings


def in_a_range(directory: str, kill: int) -> tuple[str, int]:
    trained = model, _, manager = training(directory)
    with manager:
        iterator = CFIterator(data(), cf_manager=manager)
        manager.restore()
        for _ in range(3):
            for batch in iterator:
                update(trained, [batch], kill)
    return digest(model), manager.global_step


def test_range(tmp_path: Path) -> None:
    trial = tried(in_a_range, tmp_path, kills=(13,))
    assert not trial.is_exact
    (warning,) = trial.warnings
    assert "goes on in epoch 1, but `for _ in range(3)`" in warning
    assert "Write `for _ in train_loader.epochs(3):`" in warning


def in_an_islice(directory: str, kill: int) -> tuple[str, int]:
    trained = model, _, manager = training(directory)
    with manager:
        iterator = CFIterator(data(), cf_manager=manager)
        manager.restore()
        for _ in iterator.epochs(4):
            for batch in islice(iterator, 5):
                update(trained, [batch], kill)
    return digest(model), manager.global_step


def mended_islice(directory: str, kill: int) -> tuple[str, int]:
    trained = model, _, manager = training(directory)
    with manager:
        iterator = CFIterator(data(), cf_manager=manager, batches_per_epoch=5)
        manager.restore()
        for _ in iterator.epochs(4):
            for batch in iterator:
                update(trained, [batch], kill)
    return digest(model), manager.global_step


def counted_by_hand(directory: str, kill: int) -> tuple[str, int]:
    trained = model, _, manager = training(directory)
    with manager:
        iterator = CFIterator(data(), cf_manager=manager)
        manager.restore()
        for _ in iterator.epochs(4):
            served = 0
            for batch in iterator:
                update(trained, [batch], kill)
                if (served := served + 1) == 5:
                    break
    return digest(model), manager.global_step


def test_islice(tmp_path: Path) -> None:
    trial = tried(in_an_islice, tmp_path, kills=(8,))
    assert trial.resumed.result[1] == 22
    (warning,) = trial.warnings
    assert "islice(train_loader, n) counts from 0" in warning
    assert "batches_per_epoch=n" in warning
    mended = tried(mended_islice, tmp_path / "mended", kills=(8, 3))
    assert mended.is_exact
    assert not mended.warnings
    assert mended.whole.result == trial.whole.result


def test_a_break_after_a_count_of_ones_own(tmp_path: Path) -> None:
    later = tried(counted_by_hand, tmp_path / "later", kills=(8,))
    (warning,) = later.warnings
    assert "an epoch before was left after 5 batches; epoch 1, which was resumed after 2" in warning
    first = tried(counted_by_hand, tmp_path / "first", kills=(3,))
    (warning,) = first.warnings
    assert "epoch 1 was left after 5 batches, but epoch 0, which was resumed after 2" in warning
    assert "batches_per_epoch=5" in warning
