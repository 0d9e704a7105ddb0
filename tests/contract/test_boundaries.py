"""The contract's boundaries: ``step``, ``global_step``, and where CFIterator passes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkfreq.errors import StateError
from iterators import CFIterator
from tests.contract.runs import Training, loader, managed, running, train


def test_a_boundary_is_passed_before_the_next_batch_is_fetched(chk_dir: Path) -> None:
    """The fetch sees one more boundary than the batch before it did."""
    training = Training()
    seen: list[int] = []

    def collate(rows: list[tuple[torch.Tensor]]) -> list[torch.Tensor]:
        seen.append(manager.global_step)
        return [torch.stack([row[0] for row in rows])]

    with managed(chk_dir, training.chk) as manager:
        train(training, manager, CFIterator(loader(collate_fn=collate), cf_manager=manager), 1)
    assert seen == [0, 1, 2]


def test_a_boundary_is_passed_only_if_an_update_was_attempted_since_the_last_one(
    chk_dir: Path,
) -> None:
    with running(chk_dir) as (training, manager):
        steps = []
        for number, (x,) in enumerate(CFIterator(loader(batch_size=2), cf_manager=manager)):
            steps.append(manager.global_step)
            training.backward(x)
            if number % 2:
                training.optimizer.step()
        assert steps == [0, 0, 1, 1, 2, 2]


def test_accumulate_says_so_explicitly(chk_dir: Path) -> None:
    with managed(chk_dir, Training().chk) as manager:
        iterator = CFIterator(loader(batch_size=3), cf_manager=manager, accumulate=3)
        steps = []
        for _ in iterator.epochs(2):
            for _ in iterator:
                steps.append(manager.global_step)
                with manager.updating():
                    pass
    assert steps == [0, 0, 0, 1, 2, 2, 2, 3]
    assert manager.global_step == 4


def test_the_last_boundary_of_an_epoch_is_passed_when_epochs_advances(chk_dir: Path) -> None:
    with running(chk_dir) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)
        tails: list[int] = []
        heads: list[int] = []
        for _ in iterator.epochs(2):
            heads.append(manager.global_step)
            for (x,) in iterator:
                training.update(manager, x)
            tails.append(manager.global_step)
        assert (heads, tails) == ([0, 3], [2, 5])
        assert manager.global_step == 6


def test_leaving_the_loop_early_after_an_update_passes_the_boundary_and_ends_the_epoch_there(
    chk_dir: Path,
) -> None:
    with running(chk_dir) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)
        for (x,) in iterator:
            training.update(manager, x)
            break
        assert manager.global_step == 0
        assert len(list(iterator)) == 3
        assert manager.global_step == 1
        report = iterator.last_report
        assert report is not None
        assert (report.epoch, report.served, report.not_served) == (0, 4, 8)


def test_save_with_wait_is_refused_while_a_batch_is_in_use_not_once_the_loop_was_left(
    chk_dir: Path,
) -> None:
    with running(chk_dir) as (training, manager):
        batches = CFIterator(loader(), cf_manager=manager)
        for (x,) in batches:
            if batches.step == 2:
                break
            with pytest.raises(StateError, match="iterator 'train' handed out a batch"):
                manager.save(wait=True)
            training.update(manager, x)
        for _ in batches:  # a look: the boundary before it is passed, the batch is taken back
            break
        manager.save(wait=True)
        assert manager.all_steps() == [2]


def test_step_of_a_closed_manager_is_a_state_error(chk_dir: Path) -> None:
    with managed(chk_dir, Training().chk) as manager:
        pass
    for call in (manager.step, manager.save, manager.restore, manager.wait):
        with pytest.raises(StateError, match="is closed"):
            call()
