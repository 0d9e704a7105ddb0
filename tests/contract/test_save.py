"""The contract's ``save``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkfreq
from checkfreq import CFCheckpoint, KeepBest, KeepLast
from checkfreq.errors import ConfigError, MismatchError, StateError
from checkfreq.store.store import CheckpointStore
from tests.contract.conftest import Hold
from tests.contract.runs import Training, config, managed, restored, running, written


def test_a_state_without_tensors_is_checkpointed(chk_dir: Path) -> None:
    counts = {"seen": 1}
    with managed(chk_dir, CFCheckpoint(rng=False, counts=counts)) as manager:
        manager.restore()
        counts["seen"] = 2
        manager.step()
        manager.save(wait=True)
        assert manager.all_steps() == [1]
    assert checkfreq.load(chk_dir)["counts"] == {"seen": 2}


def test_wait_away_from_a_boundary_is_a_state_error(chk_dir: Path) -> None:
    with running(chk_dir) as (training, manager):
        training.update(manager)
        with pytest.raises(StateError, match=r"between boundaries.*step\(\)"):
            manager.save(wait=True)
        manager.step()
        manager.wait()
        assert manager.all_steps() == []  # a refused request leaves nothing behind


def test_a_step_is_written_once_and_later_requests_add_marks_and_pin_it_for_good(
    chk_dir: Path,
) -> None:
    with running(chk_dir) as (training, manager):
        training.steps(manager, 1)
        manager.save(wait=True, metrics={"loss": 0.5})
        manager.save(metrics={"accuracy": 0.75})
        assert manager.stats()["num_committed"] == 1
    with running(chk_dir, retention=KeepLast(1), chk_freq=1) as (training, manager):
        manager.restore()
        manager.save(keep=True, wait=True)  # the step that was restored
        assert manager.stats()["num_committed"] == 0
        for _ in range(3):
            training.steps(manager, 1)
            manager.wait()
    store = CheckpointStore(chk_dir)
    assert store.steps() == [1, 4]
    assert store.marks()[1].keep
    assert store.marks()[1].metrics == {"loss": 0.5, "accuracy": 0.75}


def test_several_requests_for_the_next_boundary_are_one_checkpoint_with_all_marks(
    chk_dir: Path,
) -> None:
    with running(chk_dir) as (training, manager):
        training.update(manager)
        manager.save(metrics={"a": 1})
        manager.save(metrics={"b": 2})
        manager.save(keep=True)
        manager.step()
    mark = CheckpointStore(chk_dir).marks()[1]
    assert mark.keep
    assert mark.metrics == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5), 0.5])
def test_metrics_are_numbers_of_any_library(chk_dir: Path, value: Any) -> None:
    with managed(chk_dir, Training().chk) as manager:
        manager.save(wait=True, metrics={"accuracy": value})
    assert CheckpointStore(chk_dir).marks()[0].metrics == {"accuracy": 0.5}


def test_a_loss_that_diverged_is_stored_as_it_is_and_never_costs_the_best_its_place(
    chk_dir: Path,
) -> None:
    policy = KeepBest(metric="loss", num_last=1)
    with running(chk_dir, retention=policy) as (training, manager):
        for loss in (0.5, 0.25, float("nan"), float("-inf"), float("inf")):
            training.steps(manager, 1)
            manager.save(wait=True, metrics={"loss": loss})
    assert CheckpointStore(chk_dir).steps() == [2, 5]
    text = (chk_dir / "marks.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert CheckpointStore(chk_dir).marks()[5].metrics == {"loss": float("inf")}


@pytest.mark.parametrize("value", ["high", None, torch.zeros(2), 10**400, 1j])
def test_a_metric_that_is_no_number_is_a_config_error(chk_dir: Path, value: Any) -> None:
    with managed(chk_dir, Training().chk) as manager:
        with pytest.raises(ConfigError, match="expected numbers"):
            manager.save(metrics={"accuracy": value})
        manager.wait()
        assert manager.all_steps() == []


def test_periodic_checkpoints_are_deferred_and_made_up_for(
    chk_dir: Path, hold_worker: Hold
) -> None:
    gate = hold_worker("commit.mkdir")
    with running(chk_dir, chk_freq=2) as (training, manager):
        training.steps(manager, 7)
        assert manager.stats()["num_in_flight"] == 2
        assert manager.stats()["num_deferred"] == 1  # that of step 6, still due at step 7
        assert [e["kind"] for e in events(chk_dir)] == ["began", "deferred"]  # said once
        gate.open()
        manager.wait()
        assert manager.all_steps() == [2, 4]
        training.steps(manager, 1)
        manager.wait()
        assert manager.all_steps() == [2, 4, 8]


def test_a_deferred_epoch_boundary_is_made_up_for_at_the_next_one(
    chk_dir: Path, hold_worker: Hold
) -> None:
    gate = hold_worker("commit.mkdir")
    with running(chk_dir, config=config(num_slots=1)) as (training, manager):
        manager.save()
        for _ in range(2):
            training.update(manager)
            manager.end_epoch()
        assert manager.stats()["num_deferred"] == 1
        gate.open()
        manager.wait()
        training.steps(manager, 1)
        manager.wait()
        assert manager.all_steps() == [0, 3]


def test_the_first_save_with_checkpoints_there_and_no_restore_or_one_that_failed_is_refused(
    chk_dir: Path,
) -> None:
    written(chk_dir, 1)
    other = CFCheckpoint(model=torch.nn.Linear(1, 1))
    with managed(chk_dir, other) as manager:
        for call in (manager.save, manager.step):
            with pytest.raises(MismatchError):
                manager.restore()
            with pytest.raises(ConfigError, match=r"step 1\) and restore\(\) was not called"):
                call()
    assert CheckpointStore(chk_dir).steps() == [1]


def events(chk_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (chk_dir / "events.jsonl").read_text().splitlines()]


def test_a_snapshot_is_not_overwritten_before_it_is_durable(
    chk_dir: Path, hold_worker: Hold
) -> None:
    gate = hold_worker("commit.mkdir")
    with running(chk_dir, chk_freq=1, retention=KeepLast(99)) as (training, manager):
        bits = training.steps(manager, 6)
        gate.open()
        manager.wait()
        assert manager.all_steps() == [1, 2]
    for step in (2, 1):
        assert restored(chk_dir, step).bits() == bits[step - 1]
