"""What a killed run is served again does not depend on the order in which a loop fetches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, Program, data, digest, loss_of, tick, tried


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


def test_prefetch_is_warned_of_with_the_line_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefetching(str(tmp_path), 0)
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno > 20)
    assert "fetched 2 batches before its first weight update, and 1 before each later" in warning
    assert "CFIterator(..., lookahead=1)" in warning


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


@pytest.mark.parametrize(
    ("program", "kill"), [(prefetching_as_stated, 8), (zip_order, 5), (zip_open, 5)]
)
def test_what_is_fetched_in_another_order_is_served_exactly_without_a_word(
    program: Program, kill: int, tmp_path: Path
) -> None:
    """A stated lookahead; a second loader that comes first; a zip that is open over an end."""
    trial = tried(program, tmp_path, kills=(kill,))
    assert trial.is_exact
    assert not trial.warnings
