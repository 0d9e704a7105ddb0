"""The contract's "Iterator", beside a real manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq.errors import ConfigError
from iterators import CFIterator, NotResumableError
from tests.contract.runs import Training, loader, managed, running, train


def test_chk_freq_and_dynamic_that_agree_are_taken_and_that_conflict_are_a_config_error(
    chk_dir: Path,
) -> None:
    with managed(chk_dir, Training().chk, chk_freq=2) as manager:
        for pacing in ({"chk_freq": 5}, {"dynamic": False}):
            with pytest.raises(ConfigError, match=next(iter(pacing))):
                CFIterator(loader(), cf_manager=manager, **pacing)
        CFIterator(loader(), cf_manager=manager, chk_freq=2, dynamic=True)
        assert manager.stats()["interval_steps"] == 2


def test_steps_crosses_epochs_and_counts_the_total(chk_dir: Path) -> None:
    with running(chk_dir) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)
        for (x,) in iterator.steps(4):
            training.update(manager, x)
        assert manager.global_step == 4
        assert (iterator.epoch, iterator.step) == (1, 4)
    with running(chk_dir, seed=1) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)
        manager.restore()
        served = 0
        for (x,) in iterator.steps(7):
            training.update(manager, x)
            served += 1
        assert served == 3
        assert manager.global_step == 7


def test_epoch_batch_and_len_stand_for_the_whole_epoch_also_in_mid_epoch(chk_dir: Path) -> None:
    with running(chk_dir, chk_freq=1) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager, steps_to_run=4)
        places = []
        for epoch in iterator.epochs(2):
            for (x,) in iterator:
                places.append((epoch, iterator.epoch, iterator.batch, len(iterator)))
                training.update(manager, x)
        assert places == [(0, 0, 0, 3), (0, 0, 1, 3), (0, 0, 2, 3), (1, 1, 0, 3)]
    with running(chk_dir) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)
        manager.restore()
        assert (iterator.epoch, iterator.batch, len(iterator)) == (1, 1, 3)
        assert [iterator.batch for _ in iterator] == [1, 2]


def test_steps_to_run_ends_this_process_and_the_next_one_continues(chk_dir: Path) -> None:
    reference = Training()
    with managed(chk_dir / "reference", reference.chk) as manager:
        train(reference, manager, CFIterator(loader(), cf_manager=manager), 2)
        expected = reference.bits()
    for number in range(3):
        training = Training(seed=number)
        with managed(chk_dir, training.chk) as manager:
            iterator = CFIterator(loader(), cf_manager=manager, steps_to_run=2)
            assert manager.restore() is (number > 0)
            train(training, manager, iterator, 2)
            assert manager.global_step == 2 * (number + 1)
            bits = training.bits()
    assert bits == expected


def test_several_iterators_register_under_names_and_each_is_restored(chk_dir: Path) -> None:
    def iterators(manager: Any) -> tuple[CFIterator, CFIterator]:
        extra = CFIterator(loader(), cf_manager=manager, name="extra", marks_steps=False, seed=7)
        return CFIterator(loader(), cf_manager=manager), extra

    with running(chk_dir) as (training, manager):
        main, extra = iterators(manager)
        extra_batches = iter(extra)
        for (x,) in main.steps(2):
            training.update(manager, x)
            next(extra_batches)
        manager.save(wait=True)
        expected = next(extra_batches)[0]
        places = main.state_dict()
    with running(chk_dir, seed=1) as (training, manager):
        main, extra = iterators(manager)
        manager.restore(2)
        assert main.state_dict() == places
        assert torch.equal(next(iter(extra))[0], expected)
        assert manager.global_step == 2


def test_one_iterator_alone_marks_steps_and_has_its_name(chk_dir: Path) -> None:
    with managed(chk_dir, Training().chk) as manager:
        CFIterator(loader(), cf_manager=manager)
        with pytest.raises(ConfigError, match=r"'train' is registered; pass another name="):
            CFIterator(loader(), cf_manager=manager, marks_steps=False)
        with pytest.raises(ConfigError, match="both mark steps"):
            CFIterator(loader(), cf_manager=manager, name="other")
        CFIterator(loader(), cf_manager=manager, name="other", marks_steps=False)


def test_exact_refuses_a_loader_that_cannot_resume_and_false_takes_it(chk_dir: Path) -> None:
    rows = [torch.ones(4, 3) * number for number in range(3)]
    with pytest.raises(NotResumableError):
        CFIterator(rows)
    with running(chk_dir, chk_freq=1) as (training, manager):
        iterator = CFIterator(rows, cf_manager=manager, exact=False, steps_to_run=1)
        for x in iterator:
            training.update(manager, x)
    with running(chk_dir) as (training, manager):
        iterator = CFIterator(rows, cf_manager=manager, exact=False)
        manager.restore()
        assert [x[0, 0].item() for x in iterator] == [1.0, 2.0]
