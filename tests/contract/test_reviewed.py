"""Behaviours at the seams: what a reading of the whole found missing."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint, KeepLast
from checkfreq.errors import PersistError, SnapshotError
from checkfreq.persist.protocol import readable
from checkfreq.store.store import CheckpointStore
from tests.contract.conftest import Hold
from tests.contract.runs import Training, config, managed, written


def test_closing_without_time_for_the_final_checkpoint_says_so(chk_dir: Path) -> None:
    model = nn.Linear(4096, 4096)  # slots that a thread prepares
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = managed(chk_dir, CFCheckpoint(model=model, optimizer=optimizer))
    manager.step()
    try:
        manager.close(timeout_s=0.0)
    except PersistError as error:
        message = str(error)
    else:
        message = ""
    # Without a word it is durable; that it cannot be is said.
    assert bool(message) != (CheckpointStore(chk_dir).steps() == [1])


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
    training = Training()
    gate = hold_trainer("snapshot.copy_settled")
    settings = config(barrier_timeout_s=0.0, verify_settled=False)
    with managed(chk_dir, training.chk, config=settings) as manager:
        manager.save()
        manager.step()  # a boundary without an update: the copy of the one before still runs
        with pytest.raises(SnapshotError, match="barrier_timeout_s"):
            manager.save()
        gate.open()
        manager.wait()  # a leaked attempt would make it wait in vain, and raise
        assert manager.stats()["num_failed"] == 1
        assert manager.all_steps() == [0]


def test_restoring_the_newest_after_an_older_one_sets_nothing_aside(chk_dir: Path) -> None:
    written(chk_dir, 3)
    training = Training(seed=1)
    with managed(chk_dir, training.chk) as manager:
        manager.restore(1)
        manager.restore()
        training.steps(manager, 1)
        manager.save(wait=True)
    assert CheckpointStore(chk_dir).steps() == [2, 3, 4]
    assert not (chk_dir / "superseded").exists()


def test_a_clean_close_has_no_complaint(chk_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=1, retention=KeepLast(1)) as manager:
        training.steps(manager, 4)  # the last prune is still to be carried out at close
    assert CheckpointStore(chk_dir).steps() == [4]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
