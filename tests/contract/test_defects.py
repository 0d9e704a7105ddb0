"""What the 2021 code (msr-fiddle/CheckFreq) got wrong in snapshot, persist, restore and manager.

Each test is named after the number of a defect in our list, and shows that it cannot happen here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import checkfreq
from checkfreq import KeepLast
from checkfreq.errors import ConfigError, CorruptCheckpointError, StateError, WorkerDiedError
from checkfreq.store.store import CheckpointStore
from iterators import CFIterator
from tests.contract.conftest import Gate, Hold, SetFault
from tests.contract.runs import Training, config, loader, managed, train, written
from tests.contract.test_restore import flip


def test_row_1_non_tensor_leaves_of_the_optimizer_are_restored(chk_dir: Path) -> None:
    written(chk_dir, 3)
    saved = checkfreq.load(chk_dir)["optimizer"]["param_groups"][0]
    assert saved["params"] == [0, 1, 2, 3, 4, 5]
    assert saved["lr"] == 0.005  # the scheduler halved it
    assert saved["betas"] == (0.9, 0.999)
    training = Training(seed=1)
    with managed(chk_dir, training.chk) as manager:
        manager.restore()
    group = training.optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.005, (0.9, 0.999))
    assert group["params"] == list(training.model.parameters())


def test_row_2_the_iterators_place_is_in_every_checkpoint(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=1, retention=KeepLast(99)) as manager:
        iterator = CFIterator(loader(), cf_manager=manager)
        train(training, manager, iterator, 1, each=manager.wait)
    store = CheckpointStore(chk_dir)
    places = [store.manifest(step).objects["$positions"]["train"] for step in (1, 2, 3)]
    assert [(place["epoch"], place["position"]) for place in places] == [(0, 4), (0, 8), (1, 0)]


def test_row_3_numbering_continues_after_a_resume(chk_dir: Path) -> None:
    for expected in ([1, 2], [2, 3, 4], [4, 5, 6]):
        training = Training()
        with managed(chk_dir, training.chk, chk_freq=1) as manager:
            manager.restore()
            for _ in range(2):
                training.steps(manager, 1)
                manager.wait()
        assert CheckpointStore(chk_dir).steps() == expected


def test_row_4_a_torn_file_is_never_the_newest(chk_dir: Path, worker_fault: SetFault) -> None:
    written(chk_dir, 1)
    worker_fault("commit.write:kill-self:*")
    training = Training()
    manager = managed(chk_dir, training.chk, tolerate_failures=0)
    manager.restore()
    training.steps(manager, 1)
    with pytest.raises(WorkerDiedError):
        manager.save(wait=True)
    assert manager.all_steps() == [1]
    with pytest.raises(WorkerDiedError):
        manager.close()


def test_row_5_damage_falls_back_whole_or_not_at_all(chk_dir: Path) -> None:
    bits = written(chk_dir, 3)
    flip(chk_dir, 3, "optimizer.safetensors")
    training = Training(seed=1)
    with managed(chk_dir, training.chk) as manager:
        manager.restore()
        assert training.bits() == bits[1]
    training = Training(seed=1)
    for step in (1, 2):
        flip(chk_dir, step, "optimizer.safetensors")
    before = training.bits()
    with managed(chk_dir, training.chk) as manager:
        with pytest.raises(CorruptCheckpointError):
            manager.restore()
        assert training.bits() == before


def test_row_7_an_epochs_checkpoint_is_kept_and_can_be_restored(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk, retention=KeepLast(1)) as manager:
        iterator = CFIterator(loader(), cf_manager=manager)
        tail: Callable[[], None] = lambda: manager.save(keep=True)  # noqa: E731
        train(training, manager, iterator, 2, tail=tail)
    assert CheckpointStore(chk_dir).steps() == [3, 6]
    training = Training(seed=1)
    with managed(chk_dir, training.chk) as manager:
        iterator = CFIterator(loader(), cf_manager=manager)
        manager.restore(3)
        assert (iterator.epoch, iterator.batch) == (1, 0)


def test_row_8_batch_norm_statistics_are_never_torn(chk_dir: Path, hold_trainer: Hold) -> None:
    training = Training()
    gate = hold_trainer("snapshot.copy_settled")
    with managed(chk_dir, training.chk) as manager:
        training.update(manager)
        manager.step()
        manager.save()
        expected = training.state_bits()
        training.backward()  # rewrites the statistics while the copy is held
        gate.open()
        manager.wait()
    restored = Training(seed=1)
    with managed(chk_dir, restored.chk) as manager:
        manager.restore(1)
        assert restored.state_bits() == expected


def test_row_9_the_learning_rate_is_right_after_a_resume_in_mid_epoch(chk_dir: Path) -> None:
    def rates(training: Training, steps_to_run: int | None) -> list[float]:
        with managed(chk_dir, training.chk) as manager:
            manager.restore()
            found = []
            iterator = CFIterator(loader(), cf_manager=manager, steps_to_run=steps_to_run)
            train(
                training,
                manager,
                iterator,
                2,
                each=lambda: found.append(training.scheduler.get_last_lr()[0]),
            )
        return found

    first, second = rates(Training(), 2), rates(Training(seed=1), None)
    assert first + second == [0.01, 0.005, 0.005, 0.0025, 0.0025, 0.00125]


def test_row_10_generators_scaler_scheduler_and_best_metric_are_saved(chk_dir: Path) -> None:
    def make(seed: int) -> tuple[Training, torch.amp.GradScaler, dict[str, float]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
        best = {"accuracy": seed / 10}
        return Training(seed, scaler=scaler, best=best), scaler, best

    training, _, _ = make(3)
    with managed(chk_dir, training.chk) as manager:
        manager.save(wait=True)
        draws = (random.random(), np.random.rand(), torch.rand(1))
    training, scaler, best = make(4)
    with managed(chk_dir, training.chk) as manager:
        manager.restore()
        assert (random.random(), np.random.rand(), torch.rand(1)) == draws
    assert scaler.get_scale() == 8.0
    assert best == {"accuracy": 0.3}
    assert training.scheduler.last_epoch == 0
    with pytest.raises(StateError, match="best"):
        Training(best=0.3)


def test_row_12_training_goes_on_when_the_persist_process_dies(
    chk_dir: Path, worker_fault: SetFault
) -> None:
    worker_fault("worker.receive:kill-self:2")
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=1) as manager:
        for _ in range(3):
            training.steps(manager, 1)
            manager.wait()
        assert manager.all_steps() == [1, 2, 3]


def test_row_13_a_failed_persist_is_visible_and_never_written_under_a_new_number(
    chk_dir: Path, worker_fault: SetFault
) -> None:
    worker_fault("commit.mkdir:raise-ENOSPC:1")
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=1) as manager:
        bits = training.steps(manager, 1)
        manager.wait()
        assert manager.stats()["num_failed"] == 1
        bits += training.steps(manager, 1)
        manager.wait()
        assert manager.all_steps() == [2]
    restored = Training(seed=1)
    with managed(chk_dir, restored.chk) as manager:
        manager.restore()
        assert restored.bits() == bits[1]


def test_row_14_a_snapshot_is_not_overwritten_before_it_is_durable(
    chk_dir: Path, hold_worker: Hold
) -> None:
    gate = hold_worker("commit.mkdir")
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=1, retention=KeepLast(99)) as manager:
        bits = training.steps(manager, 6)
        gate.open()
        manager.wait()
        assert manager.all_steps() == [1, 2]
    for step in (2, 1):
        restored = Training(seed=9)
        with managed(chk_dir, restored.chk) as manager:
            manager.restore(step)
            assert restored.bits() == bits[step - 1]


def _snapshot_and_die(chk_dir: Path, gate: Gate) -> None:
    training = Training()
    manager = managed(chk_dir, training.chk)
    training.steps(manager, 1)
    manager.save()
    gate.wait_reached()
    os.kill(os.getpid(), signal.SIGKILL)


def test_row_15_a_persist_outlives_its_trainer(chk_dir: Path, hold_worker: Hold) -> None:
    """The trainer is killed while its worker has hardly begun; the worker commits alone."""
    gate = hold_worker("commit.mkdir")
    process = multiprocessing.get_context("spawn").Process(
        target=_snapshot_and_die, args=(chk_dir, gate)
    )
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL
    assert CheckpointStore(chk_dir).steps() == []
    gate.open()
    with managed(chk_dir, Training(seed=1).chk) as manager:
        assert manager.restore()  # waits for the lock, so for the worker
        assert manager.global_step == 1


def test_row_23_a_run_shorter_than_its_interval_gets_a_final_checkpoint(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=100) as manager:
        train(training, manager, CFIterator(loader(), cf_manager=manager), 1)
        bits = training.bits()
    restored = Training(seed=1)
    with managed(chk_dir, restored.chk) as manager:
        assert manager.restore()
        assert restored.bits() == bits


def test_row_24_the_same_buffers_serve_every_checkpoint(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=1) as manager:
        training.steps(manager, 1)
        buffers = [(slot.fd, slot.address) for slot in manager._pipeline._arena.slots]
        for _ in range(5):
            training.steps(manager, 1)
            manager.wait()
        assert [(slot.fd, slot.address) for slot in manager._pipeline._arena.slots] == buffers
        assert len(buffers) == 2


def test_row_26_one_worker_process_serves_every_checkpoint(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=1) as manager:
        pids = set()
        for _ in range(4):
            training.steps(manager, 1)
            manager.wait()
            pids.add(json.loads((chk_dir / ".lock").read_text())["worker_pid"])
        assert len(pids) == 1
        assert pids != {os.getpid()}


def test_row_29_two_runs_that_start_at_once_do_not_share_a_directory(chk_dir: Path) -> None:
    managers = [managed(chk_dir, Training().chk, config=config(takeover_s=0.0)) for _ in range(2)]
    outcomes = []
    for manager in managers:
        try:
            manager.save(wait=True)
            outcomes.append("saved")
        except ConfigError:
            outcomes.append("refused")
    for manager in reversed(managers):
        manager.close()
    assert sorted(outcomes) == ["refused", "saved"]
    assert CheckpointStore(chk_dir).steps() == [0]


def test_row_32_old_checkpoints_are_removed_but_never_the_last_valid_one(chk_dir: Path) -> None:
    written(chk_dir, 5, retention=KeepLast(2))
    assert CheckpointStore(chk_dir).steps() == [4, 5]


def test_row_34_a_restore_needs_no_second_copy_of_the_tensors(chk_dir: Path) -> None:
    written(chk_dir, 1)
    training = Training(seed=1)
    addresses = [tensor.data_ptr() for tensor in training.model.state_dict().values()]
    with managed(chk_dir, training.chk) as manager:
        manager.restore()
    assert [t.data_ptr() for t in training.model.state_dict().values()] == addresses
    names = {path.suffix for path in CheckpointStore(chk_dir).path(1).iterdir()}
    assert names == {".json", ".safetensors"}  # and no pickle
