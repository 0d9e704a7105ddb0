"""The contract's failed persists: logged, retried, and never the end of the training by default."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from checkfreq import CFManager
from checkfreq.errors import PersistError, SnapshotError, WorkerDiedError
from checkfreq.events import FailureNotice
from checkfreq.persist.protocol import readable
from tests.contract.conftest import Hold, SetFault
from tests.contract.runs import Training, config, managed, running, written

EVERY_COMMIT_FAILS = "commit.sync_payload:raise-EIO:*"


def failing(training: Training, manager: CFManager, num: int) -> None:
    """Iterations whose checkpoints fail, each known to have before the next begins."""
    for number in range(1, num + 1):
        training.steps(manager, 1)
        reap(manager, lambda number=number: manager.stats()["num_failed"] == number)  # type: ignore[misc]


def reap(manager: CFManager, condition: Callable[[], bool]) -> None:
    """Have the manager take in replies until it knows; never raises for their sake."""
    assert manager._persistence.wait_until(condition, timeout_s=120.0)


def test_a_failed_persist_is_logged_as_error_and_training_goes_on(
    chk_dir: Path, worker_fault: SetFault, caplog: pytest.LogCaptureFixture
) -> None:
    written(chk_dir, 1)
    worker_fault("commit.sync_payload:raise-ENOSPC:1")
    with running(chk_dir, chk_freq=1) as (training, manager):
        manager.restore()
        failing(training, manager, 1)
        records = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert len(records) == 1
        assert "checkpoint of step 2 failed (1 in a row)" in records[0].message
        assert "No checkpoint newer than step 1 has become durable" in records[0].message
        assert "No space left" in records[0].message
        assert manager.all_steps() == [1]
        manager.wait()
        training.steps(manager, 1)


@pytest.mark.parametrize("requested", [False, True])
def test_by_default_failures_in_a_row_pause_the_tries_and_never_end_the_training(
    chk_dir: Path, worker_fault: SetFault, requested: bool
) -> None:
    worker_fault("commit.mkdir:raise-ENOSPC:1;commit.write:raise-ENOSPC:2")
    told: list[FailureNotice] = []
    training = Training()
    with managed(
        chk_dir, training.chk, chk_freq=1, config=config(on_failure=told.append)
    ) as manager:
        failing(training, manager, 2)
        manager.wait()  # raises nothing
        if requested:  # is tried during the pause
            manager.save(wait=True)
            assert manager.all_steps() == [manager.global_step]
        while not manager.stats()["num_committed"]:
            training.steps(manager, 1)
    assert [(notice.num_in_row, notice.is_over) for notice in told] == [
        (1, False),
        (2, False),
        (0, True),
    ]
    assert "No space left" in str(told[1].error)
    lines = [json.loads(line) for line in (chk_dir / "events.jsonl").read_text().splitlines()]
    whys = [line["why"] for line in lines if line["kind"] == "deferred"]
    assert requested or any(why.startswith("2 failed in a row; the next try is in") for why in whys)
    assert [line["steps_at_risk"] for line in lines if line["kind"] == "failed"] == [
        told[0].steps_at_risk,
        told[1].steps_at_risk,
    ]


def test_workers_that_cannot_use_the_directory_are_not_started_at_every_boundary(
    chk_dir: Path,
) -> None:
    training = Training()
    manager = managed(chk_dir, training.chk, chk_freq=0)
    training.steps(manager, 1)
    manager.save(wait=True)
    aside = chk_dir.with_name("aside")
    chk_dir.rename(aside)
    chk_dir.touch()  # no directory any more, until it is put back
    process = manager._persistence._client._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60.0)
    while manager._persistence._restarts.num_in_row < 2:
        training.steps(manager, 1)
    before = manager.stats()["num_workers_replaced"]
    training.steps(manager, 5)  # a pause may end meanwhile, on a slow machine
    assert manager.stats()["num_workers_replaced"] <= before + 1
    chk_dir.unlink()
    aside.rename(chk_dir)
    manager.close()
    assert manager.all_steps() == [1, manager.global_step]


CALLS: dict[str, Callable[[CFManager], None]] = {
    "step": lambda manager: manager.step(),
    "wait": lambda manager: manager.wait(),
    "close": lambda manager: manager.close(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_more_than_tolerated_in_a_row_raise_with_the_childs_traceback(
    chk_dir: Path, worker_fault: SetFault, call: Callable[[CFManager], None]
) -> None:
    worker_fault(EVERY_COMMIT_FAILS)
    training = Training()
    manager = managed(chk_dir, training.chk, chk_freq=1, tolerate_failures=1)
    failing(training, manager, 2)
    with pytest.raises(PersistError, match="Persist worker's traceback") as caught:
        call(manager)
    assert caught.value.phase == "sync"
    assert "finish_payload" in caught.value.child_traceback
    if call is not CALLS["close"]:
        with pytest.raises(PersistError):
            manager.close()


def test_a_success_starts_the_count_anew(chk_dir: Path, worker_fault: SetFault) -> None:
    worker_fault("commit.mkdir:raise-EIO:1;commit.sync_payload:raise-EIO:7")
    with running(chk_dir, chk_freq=1, tolerate_failures=1) as (training, manager):
        failing(training, manager, 1)
        for _ in range(2):  # three files each: the seventh sync is the fourth attempt's
            training.steps(manager, 1)
            manager.wait()
        training.steps(manager, 1)
        reap(manager, lambda: manager.stats()["num_failed"] == 2)
        training.steps(manager, 1)
        manager.wait()
        assert manager.all_steps() == [2, 3, 5]


def test_a_snapshot_that_kills_every_worker_is_given_up_and_counted(
    chk_dir: Path, worker_fault: SetFault
) -> None:
    worker_fault("commit.mkdir:kill-self:*")
    training = Training()
    manager = managed(chk_dir, training.chk, tolerate_failures=0)
    training.steps(manager, 1)
    with pytest.raises(WorkerDiedError, match="step 1") as caught:
        manager.save(wait=True)
    assert caught.value.step == 1
    assert manager.stats()["num_failed"] == 1
    with pytest.raises(WorkerDiedError):
        manager.close()


def test_a_reply_that_waited_for_the_trainer_does_not_count_as_late(chk_dir: Path) -> None:
    training = Training()
    manager = managed(chk_dir, training.chk, config=config(persist_timeout_s=0.0))
    manager.save()
    channel = manager._persistence._client._channel
    assert channel is not None
    assert readable(channel.fileno(), timeout_s=120.0), "the worker did not answer"
    training.steps(manager, 1)
    stats = manager.stats()
    # The last checkpoint is late where its reply is not there at once: that is another matter.
    with suppress(PersistError):
        manager.close()
    assert (stats["num_committed"], stats["num_workers_replaced"]) == (1, 0)


def test_an_attempt_that_cannot_begin_ends_and_is_counted(
    chk_dir: Path, hold_trainer: Hold
) -> None:
    gate = hold_trainer("snapshot.copy_settled")
    settings = config(barrier_timeout_s=0.0, verify_settled=False)
    with managed(chk_dir, Training().chk, config=settings) as manager:
        manager.save()
        manager.step()  # a boundary without an update: the copy of the one before still runs
        with pytest.raises(SnapshotError, match="barrier_timeout_s"):
            manager.save()
        gate.open()
        manager.wait()  # a leaked attempt would make it wait in vain, and raise
        assert manager.stats()["num_failed"] == 1
        assert manager.all_steps() == [0]
