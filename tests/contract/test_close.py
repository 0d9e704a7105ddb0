"""The contract's ``wait`` and ``close``."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from checkfreq import KeepLast
from checkfreq.errors import PersistError
from checkfreq.store.store import CheckpointStore
from iterators import CFIterator
from tests.contract.conftest import Hold, SetFault
from tests.contract.runs import Training, loader, managed, restored, running, written


def test_a_clean_close_passes_the_boundary_that_an_iterator_still_owes(chk_dir: Path) -> None:
    with running(chk_dir) as (training, manager):
        for (x,) in CFIterator(loader(), cf_manager=manager):
            training.update(manager, x)
        assert manager.global_step == 2
    assert CheckpointStore(chk_dir).steps() == [3]


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_last_update_that_no_boundary_came_after_is_named(
    is_restored: bool, chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    if is_restored:
        written(chk_dir, 2)
    with managed(chk_dir, training.chk) as manager:
        if not manager.restore():
            training.steps(manager, 2)
            manager.save(wait=True)
        caplog.clear()
        training.update(manager)
    (said,) = caplog.messages
    assert said.startswith("the last update is in no checkpoint: no boundary was passed after it")
    assert "the newest checkpoint is of step 2" in said


@pytest.mark.parametrize("done_before", [0, 1])
def test_a_shorter_last_group_of_batches_has_its_boundary_where_the_loop_is_left_on_it(
    done_before: int, chk_dir: Path
) -> None:
    """As of accumulate=2 and three batches, by a Trainer that counts its updates."""
    training = Training()

    def update_after(batches: tuple[int, ...]) -> None:
        with managed(chk_dir, training.chk) as manager:
            iterator = CFIterator(loader(), cf_manager=manager, accumulate=2)
            manager.restore()
            for (x,) in iterator:
                training.backward(x)
                if iterator.batch in batches:
                    manager.weight_update()
                    training.optimizer.zero_grad()
                if iterator.batch == batches[-1]:
                    break

    if done_before:
        update_after((1,))
        assert CheckpointStore(chk_dir).steps() == [1]
    update_after((1, 2))
    assert CheckpointStore(chk_dir).steps()[-1] == 2


def test_after_an_exception_only_work_in_flight_is_finished(
    chk_dir: Path, hold_worker: Hold
) -> None:
    gate = hold_worker("commit.mkdir")
    training = Training()

    def crash() -> None:
        with managed(chk_dir, training.chk, chk_freq=2) as manager:
            for (x,) in CFIterator(loader(), cf_manager=manager).steps(9):
                training.update(manager, x)
                if manager.global_step == 3:  # and a boundary is pending
                    gate.open()
                    raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        crash()
    assert CheckpointStore(chk_dir).steps() == [2]
    assert '"how": "failed"' in (chk_dir / "events.jsonl").read_text().splitlines()[-1]


def step_and_crash(chk_dir: Path) -> None:
    with running(chk_dir, chk_freq=1, tolerate_failures=0) as (training, manager):
        training.steps(manager, 1)
        raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("commit.mkdir:raise-ENOSPC:*", "checkpoint of step 1 failed"),
        ("slot.release:raise-EIO:*", "while closing after ZeroDivisionError"),
    ],
    ids=["a failing persist", "an error of ours"],
)
def test_the_exception_is_never_masked(
    chk_dir: Path, trainer_fault: SetFault, caplog: pytest.LogCaptureFixture, script: str, said: str
) -> None:
    trainer_fault(script)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        step_and_crash(chk_dir)
    assert caught.value.__context__ is None
    assert said in caplog.text


def test_close_tries_the_last_checkpoint_once_more(chk_dir: Path, worker_fault: SetFault) -> None:
    worker_fault("commit.sync_payload:raise-EIO:1")
    with running(chk_dir) as (training, manager):
        training.steps(manager, 1)
    assert CheckpointStore(chk_dir).steps() == [1]


def test_close_gives_up_at_its_timeout_and_raises(
    chk_dir: Path, hold_worker: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    hold_worker("commit.mkdir")
    training = Training()
    manager = managed(chk_dir, training.chk)
    training.steps(manager, 1)
    with pytest.raises(PersistError, match=r"waited 0 s for"):
        manager.close(timeout_s=0.1)
    assert "did not finish within 0 s and was killed" in caplog.text
    assert CheckpointStore(chk_dir).steps() == []


def test_a_clean_close_checkpoints_the_last_boundary_if_there_is_one_and_has_no_complaint(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(chk_dir, chk_freq=3, retention=KeepLast(1)) as (training, manager):
        assert manager.restore() is False
        bits = training.steps(manager, 4)  # the last prune is still to be carried out at close
    assert CheckpointStore(chk_dir).steps() == [4]
    assert restored(chk_dir).bits() == bits[-1]
    managed(chk_dir.with_name("nothing done"), training.chk).close()
    assert CheckpointStore(chk_dir.with_name("nothing done")).steps() == []
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
