"""The contract's ``finish()``: a run that is over stays over when it is started again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkfreq import CFManager
from checkfreq.errors import StateError
from checkfreq.store.store import CheckpointStore
from iterators import CFIterator
from tests.contract.runs import Training, loader, managed, running, train


def stop_early(chk_dir: Path, *, after: int = 2, breaks: bool = True, **restore: object) -> int:
    """The loop of a script with early stopping; how many updates this process made."""
    training = Training(history={"epochs": []})
    history = training.chk.tracked["history"]
    with managed(chk_dir, training.chk) as manager:
        train_loader = CFIterator(loader(), cf_manager=manager)
        manager.restore(**restore)  # type: ignore[arg-type]
        for epoch in train_loader.epochs(5):
            for (x,) in train_loader:
                training.update(manager, x)
            history["epochs"].append(epoch)
            if len(history["epochs"]) >= after:
                manager.finish()
                if breaks:
                    break
        assert manager.finished
    return manager.update_attempts


@pytest.mark.parametrize("breaks", [True, False])
def test_a_run_that_stopped_early_trains_no_more_when_it_is_started_again(
    chk_dir: Path, breaks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert stop_early(chk_dir, breaks=breaks) == 6
    assert "is finished" not in caplog.text
    for _ in range(2):
        assert stop_early(chk_dir, breaks=breaks) == 0
    assert CheckpointStore(chk_dir).steps() == [3, 6]
    assert "this run is finished: finish() was called at step 6" in caplog.text
    assert "restore(reopen=True)" in caplog.text
    lines = (chk_dir / "events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert kinds.count("finished") == 1


def test_a_run_that_was_not_noted_as_finished_only_repeats_its_tail(chk_dir: Path) -> None:
    """As after a kill between the last checkpoint and the mark."""
    stop_early(chk_dir)
    (chk_dir / "marks.jsonl").unlink()
    assert stop_early(chk_dir, after=3) == 3


def test_a_finished_run_can_be_reopened_and_is_not_finished_again_until_it_says_so(
    chk_dir: Path,
) -> None:
    stop_early(chk_dir)
    assert stop_early(chk_dir, after=3, reopen=True) == 3
    assert stop_early(chk_dir, after=3) == 0
    training = Training(history={"epochs": []})
    with managed(chk_dir, training.chk) as manager:
        CFIterator(loader(), cf_manager=manager)
        manager.restore(reopen=True)
        assert not manager.finished
    assert not CheckpointStore(chk_dir).marks()[9].finished


def test_an_earlier_step_or_a_fresh_start_is_not_finished(chk_dir: Path) -> None:
    with running(chk_dir, chk_freq=1) as (training, manager):
        for _ in range(3):
            training.steps(manager, 1)
            manager.wait()
        manager.finish()
    with managed(chk_dir, Training().chk) as manager:
        manager.restore(step=2)
        assert not manager.finished
    with managed(chk_dir, Training().chk, fresh=True) as manager:
        manager.restore()
        assert not manager.finished
    with managed(chk_dir, Training().chk) as manager:
        manager.restore()
        assert manager.finished


def test_without_an_iterator_a_finished_run_says_so_and_refuses_to_step(chk_dir: Path) -> None:
    with running(chk_dir) as (training, manager):
        training.steps(manager, 2)
        manager.finish()
        manager.finish()
        with pytest.raises(StateError, match=r"finished \(step 2\).*reopen=True"):
            manager.step()
    with running(chk_dir) as (training, manager):
        manager.restore()
        assert manager.finished
        with pytest.raises(StateError, match=r"finished \(step 2\)"):
            manager.step()
    assert CheckpointStore(chk_dir).steps() == [2]


def test_finish_in_the_middle_of_an_epoch_ends_the_loop_there(chk_dir: Path) -> None:
    for num_updates in (2, 0):
        with running(chk_dir) as (training, manager):
            train_loader = CFIterator(loader(), cf_manager=manager)
            manager.restore()

            def each(manager: CFManager = manager) -> None:
                if manager.global_step == 1:
                    manager.finish()

            train(training, manager, train_loader, 3, each=each)
            for _ in train_loader.steps(9):
                raise AssertionError("a finished run hands out nothing")
        assert manager.update_attempts == num_updates
    assert CheckpointStore(chk_dir).steps() == [2]


def test_finish_between_boundaries_is_refused(chk_dir: Path) -> None:
    with running(chk_dir) as (training, manager):
        training.steps(manager, 1)
        training.update(manager)
        with pytest.raises(StateError, match=r"finish\(\) between boundaries: an update"):
            manager.finish()
        assert not manager.finished
        manager.step()
        manager.finish()
