"""Loops as users write them: epochs, prefetching, a second pass, code after the loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator, IterationStateError
from tests.silence.training import (
    EVERY,
    data,
    digest,
    killed_and_resumed,
    loss_of,
    start,
    tick,
    tried,
)

# ---- where an epoch ends: uneven groups, growing data, epochs that are cut short or counted anew


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
    trial = tried(grow, tmp_path, kills=(13, 3))
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


def in_epochs(
    directory: str,
    kill: int,
    *,
    cut: Callable[[CFIterator], Any] = lambda iterator: iterator,
    break_after: int = 0,
    **settings: Any,
) -> tuple[str, int]:
    """Epochs that are cut short in the way of a script."""
    trained = model, _, manager = training(directory)
    with manager:
        iterator = CFIterator(data(), cf_manager=manager, **settings)
        manager.restore()
        for _ in iterator.epochs(4):
            served = 0
            for batch in cut(iterator):
                update(trained, [batch], kill)
                if (served := served + 1) == break_after:
                    break
    return digest(model), manager.global_step


def in_an_islice(directory: str, kill: int) -> tuple[str, int]:
    return in_epochs(directory, kill, cut=lambda iterator: islice(iterator, 5))


def counted_by_hand(directory: str, kill: int) -> tuple[str, int]:
    return in_epochs(directory, kill, break_after=5)


@pytest.mark.parametrize(
    ("program", "kill", "said"),
    [
        (
            in_a_range,
            13,
            (
                "goes on in epoch 1, but `for _ in range(3)`",
                "Write `for _ in train_loader.epochs(3):`",
            ),
        ),
        (in_an_islice, 8, ("islice(train_loader, n) counts from 0", "batches_per_epoch=n")),
        (
            counted_by_hand,
            8,
            ("an epoch before was left after 5 batches; epoch 1, which was resumed after 2",),
        ),
        (
            counted_by_hand,
            3,
            (
                "epoch 1 was left after 5 batches, but epoch 0, which was resumed after 2",
                "batches_per_epoch=5",
            ),
        ),
    ],
)
def test_epochs_that_a_resumed_run_counts_otherwise_are_told_with_what_to_write(
    program: Any, kill: int, said: tuple[str, ...], tmp_path: Path
) -> None:
    killed, resumed = killed_and_resumed(program, tmp_path, kills=(kill,))
    (warning,) = [*killed.warnings, *resumed.warnings]
    assert all(part in warning for part in said)


# ---- what a killed run is served again does not depend on the order in which a loop fetches


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


def test_prefetch_is_exact_once_its_lookahead_is_stated(tmp_path: Path) -> None:
    trial = tried(prefetching_as_stated, tmp_path, kills=(8,))
    assert trial.is_exact
    assert not trial.warnings


# ---- a second loop over the training data within an epoch: an evaluation, or an error


def second_pass(directory: str, kill: int) -> tuple[str, int, list[int]]:
    loader = data()
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    counted = []
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        num_updates = manager.global_step if manager.restore() else 0
        for _ in batches.epochs(4):
            for x, y in batches:
                num_updates += 1
                tick(manager, num_updates == kill)
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
                if batches.batch == 2:  # in mid-epoch too
                    counted.append(sum(len(y) for _, y in batches.evaluate()))
            with torch.no_grad():
                counted.append(sum(len(y) for _, y in batches))
        return digest(model), manager.global_step, counted[-2:]


def test_second_pass_under_no_grad_is_an_evaluation_and_moves_nothing(tmp_path: Path) -> None:
    trial = tried(second_pass, tmp_path, kills=(11,))
    assert trial.whole.result[1:] == (32, [64, 64])
    assert trial.is_exact
    assert not trial.warnings


def test_second_pass_that_could_train_is_an_error_that_names_evaluate(tmp_path: Path) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with CFManager(tmp_path, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(data(), cf_manager=manager)
        turns = batches.epochs(2)
        next(turns)
        for _ in batches:
            manager.weight_update()
        with pytest.raises(IterationStateError, match=r"in train_loader\.evaluate\(\)"):
            iter(batches)
        assert next(turns) == 1
        assert len(list(batches)) == len(batches)


# ---- code after the loop that needs its variables, killed after the last checkpoint


def fails_after_loop(directory: str, kill: int) -> float:
    loader = data()
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in batches.epochs(2):
            for x, y in batches:
                loss = loss_of(model, x, y)
                loss.backward()
                manager.weight_update()
                optimizer.zero_grad()
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss.item()


def test_a_restore_that_leaves_nothing_to_train_says_so(tmp_path: Path) -> None:
    killed = start(fails_after_loop, tmp_path / "chk", kill=1)
    assert killed.exit_code == -signal.SIGKILL, killed.error
    again = start(fails_after_loop, tmp_path / "chk")
    assert "UnboundLocalError" in again.error
    assert any("variables that only it sets do not exist after it" in text for text in again.infos)
