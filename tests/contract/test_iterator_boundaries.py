"""What CFManager and CFIterator agree on about boundaries."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import StateError
from iterators import CFIterator


def manager(chk_dir: Path, model: torch.nn.Module) -> CFManager:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    return CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0)


def loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4)


def update(cf: CFManager, model: torch.nn.Module, batch: list[torch.Tensor]) -> None:
    model(batch[0]).sum().backward()
    cf.weight_update()


def test_save_with_wait_is_refused_while_a_batch_is_in_use(chk_dir: Path) -> None:
    model = torch.nn.BatchNorm1d(4)
    with manager(chk_dir, model) as cf:
        for batch in CFIterator(loader(), cf_manager=cf):
            with pytest.raises(StateError, match="iterator 'train' handed out a batch"):
                cf.save(wait=True)
            update(cf, model, batch)


def test_save_with_wait_works_after_a_loop_that_was_left_before_an_update(chk_dir: Path) -> None:
    model = torch.nn.BatchNorm1d(4)
    with manager(chk_dir, model) as cf:
        batches = CFIterator(loader(), cf_manager=cf)
        for batch in batches:
            if batches.step == 2:
                break
            update(cf, model, batch)
        for _ in batches:  # a look: the boundary before it is passed, the batch is taken back
            break
        cf.save(wait=True)
        assert cf.all_steps() == [2]


def test_a_save_asked_for_in_mid_iteration_is_made_at_the_next_boundary(chk_dir: Path) -> None:
    model = torch.nn.BatchNorm1d(4)
    with manager(chk_dir, model) as cf:
        for batch in CFIterator(loader(), cf_manager=cf).steps(2):
            cf.save()
            update(cf, model, batch)
        cf.wait()
        assert cf.all_steps() == [1, 2]
