"""Which checkpoints a run keeps: by default, at epochs, the best, and on a disk that is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkfreq import CFManager, KeepBest, KeepEpochs, KeepLast, load
from checkfreq.errors import ConfigError, NoCheckpointError
from checkfreq.policy.retention import Retention
from checkfreq.store.store import CheckpointStore
from iterators import CFIterator
from tests.contract.conftest import SetFault
from tests.contract.runs import Training, loader, managed, running, train


def steps_of(chk_dir: Path) -> list[int]:
    """On disk, after the worker has ended: its last removals are done."""
    return CheckpointStore(chk_dir).steps()


def rated(chk_dir: Path, losses: list[float], **changes: Any) -> list[str]:
    """A run with one checkpoint per loss; the bits at each boundary."""
    with running(chk_dir, **{"retention": KeepLast(99), **changes}) as (training, manager):
        bits = []
        for loss in losses:
            bits += training.steps(manager, 1)
            manager.save(wait=True, metrics={"loss": loss})
    return bits


# ---- policies


def test_a_budget_in_bytes_holds_with_the_sizes_on_disk(chk_dir: Path) -> None:
    rated(chk_dir / "one", [0.5])
    size = CheckpointStore(chk_dir / "one").manifest(1).num_bytes
    rated(chk_dir / "run", [0.5] * 6, retention=KeepLast(5).within(2 * size + size // 2))
    assert steps_of(chk_dir / "run") == [5, 6]


@pytest.mark.parametrize("settings", [{}, {"chk_freq": 2}])
def test_the_end_of_each_epoch_is_kept_and_taken_however_long_the_interval_is(
    chk_dir: Path, settings: dict[str, Any]
) -> None:
    retention: Retention = KeepLast(1) | KeepEpochs()
    with running(chk_dir, retention=retention, **settings) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)
        train(training, manager, iterator, 2)
    # Three boundaries an epoch. A later run knows from the directory which ended one.
    assert steps_of(chk_dir) == [3, 6]
    again = Training(seed=1)
    with managed(chk_dir, again.chk, retention=retention, **settings) as manager:
        iterator = CFIterator(loader(), cf_manager=manager)
        manager.restore()
        train(again, manager, iterator, 3)
    assert steps_of(chk_dir) == [3, 6, 9]


# ---- the best


def test_the_best_step_is_found_and_restored_to_the_same_bits(chk_dir: Path) -> None:
    bits = rated(chk_dir, [0.5, 0.2, float("nan"), 0.9, 0.3])
    for name, step in (("best:loss", 2), ("best:loss:max", 4), ("best:loss:min", 2)):
        with running(chk_dir, seed=3) as (training, manager):
            assert manager.best_step("loss") == 2
            assert manager.best_step("loss", highest=True) == 4
            assert manager.best_step("accuracy") is None
            assert manager.restore(name)
            assert manager.global_step == step
            assert training.bits() == bits[step - 1]
        found, expected = load(chk_dir, step=name), load(chk_dir, step=step)
        assert found["model"]["layers.0.weight"].equal(expected["model"]["layers.0.weight"])


def test_the_best_step_counts_what_was_just_marked_and_is_what_the_policy_keeps(
    chk_dir: Path,
) -> None:
    with running(chk_dir) as (training, manager):
        for loss in (0.5, 0.2, 0.7):
            training.steps(manager, 1)
            manager.save(wait=True)
            manager.save(metrics={"loss": loss})
        assert manager.best_step("loss") == 2
        training.steps(manager, 1)
    assert manager.best_step("loss") == 2
    retention = KeepLast(9) | KeepBest(metric="loss", highest=True)
    with running(chk_dir, seed=3, retention=retention) as (training, manager):
        assert manager.best_step("loss") == 3  # what the policy keeps is the best
        assert manager.restore("best:loss")
        assert manager.global_step == 3


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        ("best:f1", NoCheckpointError, "no checkpoint with a finite metric 'f1'"),
        ("newest", ConfigError, "expected a number, 'best:METRIC'"),
    ],
)
def test_a_best_that_there_is_not_is_an_error_and_changes_nothing(
    chk_dir: Path, step: str, error: type[Exception], message: str
) -> None:
    rated(chk_dir, [0.5])
    training = Training(seed=3)
    before = training.bits()
    with managed(chk_dir, training.chk) as manager:
        with pytest.raises(error, match=message):
            manager.restore(step)
        assert training.bits() == before
    with pytest.raises(error, match=message):
        load(chk_dir, step=step)


# ---- a full disk


def fill(manager: CFManager, training: Training, num: int) -> None:
    for _ in range(num):
        training.steps(manager, 1)
        manager.save()
        manager.wait()


def test_a_checkpoint_that_failed_for_lack_of_room_makes_room_for_the_next(
    chk_dir: Path, worker_fault: SetFault, caplog: pytest.LogCaptureFixture
) -> None:
    worker_fault("commit.mkdir:raise-ENOSPC:4")
    retention = KeepLast(3).within_disk()
    with running(chk_dir, retention=retention) as (training, manager):
        fill(manager, training, 4)
        fill(manager, training, 1)
        assert manager.stats()["num_failed"] == 1
    assert "the disk had no room for step 4" in caplog.text
    assert "removing step(s) [1, 2]" in caplog.text
    assert steps_of(chk_dir) == [3, 5]
