"""What a killed run is served again does not depend on the order in which a loop fetches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, loss_of, start, tick, tried


def ahead(batches: Iterable[Any]) -> Iterator[Any]:
    remaining = iter(batches)
    following = next(remaining, None)
    while following is not None:
        batch, following = following, next(remaining, None)
        yield batch


def prefetching(directory: str, kill: int, **options: Any) -> str:
    loader = data()
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager, **options)
        num_updates = manager.global_step if manager.restore() else 0
        for _ in batches.epochs(3):
            for x, y in ahead(batches):
                num_updates += 1
                tick(manager, num_updates == kill)
                loss_of(model, x, y).backward()
                manager.weight_update()
                optimizer.zero_grad()
    return digest(model)


def prefetching_as_stated(directory: str, kill: int) -> str:
    return prefetching(directory, kill, lookahead=1)


def test_prefetch_is_warned_of_with_the_line_to_write(tmp_path: Path) -> None:
    (warning,) = start(prefetching, tmp_path).warnings
    assert "fetched 2 batches before its first weight update, and 1 before each later" in warning
    assert "CFIterator(..., lookahead=1)" in warning


def test_prefetch_is_exact_once_its_lookahead_is_stated(tmp_path: Path) -> None:
    trial = tried(prefetching_as_stated, tmp_path, kills=(5, 8))
    assert trial.is_exact
    assert not trial.warnings


def zipping(directory: str, kill: int, *, comes_first: bool, leaves_at: int, n: int) -> str:
    loader = data(n)
    other = DataLoader(TensorDataset(torch.randn(56, 8)), batch_size=8, shuffle=True)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        main = CFIterator(loader, cf_manager=manager, seed=1)
        second = CFIterator(other, cf_manager=manager, seed=2, name="second", marks_steps=False)
        num_updates = manager.global_step if manager.restore() else 0
        for _ in main.epochs(3):
            pairs: Any = (
                zip(second, main, strict=False) if comes_first else zip(main, second, strict=False)
            )
            for pair in pairs:
                (u,), (x, y) = pair if comes_first else pair[::-1]
                num_updates += 1
                tick(manager, num_updates == kill)
                loss_of(model, x + u, y).backward()
                manager.weight_update()
                optimizer.zero_grad()
                if main.batch == leaves_at:
                    break
    return digest(model)


def zip_order(directory: str, kill: int) -> str:
    return zipping(directory, kill, comes_first=True, leaves_at=99, n=64)


def zip_open(directory: str, kill: int) -> str:
    return zipping(directory, kill, comes_first=False, leaves_at=3, n=40)


def test_zip_order_in_which_the_second_loader_comes_first_is_exact(tmp_path: Path) -> None:
    trial = tried(zip_order, tmp_path, kills=(5,))
    assert trial.is_exact
    assert not trial.warnings


def test_zip_open_that_a_variable_keeps_over_the_epochs_end_is_exact(tmp_path: Path) -> None:
    trial = tried(zip_open, tmp_path, kills=(5,))
    assert trial.is_exact
    assert not trial.warnings
