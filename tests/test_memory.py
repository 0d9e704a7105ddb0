"""Memory does not grow with the number of checkpoints, and the worker stays small."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.lab.states import manual_manager
from benchmarks.lab.usage import Usage, warm_block, worker_pid
from benchmarks.memory.measure import save_once

MIB = 2**20
STATE_BYTES = 24 * MIB


@pytest.mark.slow
def test_fifty_saves_take_no_more_memory_than_ten(tmp_path: Path) -> None:
    block = warm_block(STATE_BYTES)
    before = Usage.of(os.getpid())
    with manual_manager(str(tmp_path), block) as manager:
        for _ in range(10):
            save_once(manager, block)
        early, early_worker = Usage.of(os.getpid()), Usage.of(worker_pid(manager))
        for _ in range(40):
            save_once(manager, block)
        late, late_worker = Usage.of(os.getpid()), Usage.of(worker_pid(manager))
        num_slots = len(manager._pipeline._arena.slots)

    assert late_worker.private < 64 * MIB
    assert late_worker.shared < num_slots * STATE_BYTES + MIB  # the slack takes no memory
    grown = late.anonymous + late.shared - before.anonymous - before.shared
    assert grown + late_worker.private < num_slots * STATE_BYTES + 64 * MIB
    assert late.anonymous - early.anonymous < 8 * MIB
    assert late_worker.anonymous - early_worker.anonymous < 4 * MIB
    assert (late.num_fds, late.num_threads) == (early.num_fds, early.num_threads)
    assert late_worker.num_threads == early_worker.num_threads
    assert late_worker.num_fds <= early_worker.num_fds + 2  # it may be pruning just now


def test_a_closed_manager_leaves_no_descriptor_thread_or_slot_behind(tmp_path: Path) -> None:
    block = warm_block(MIB)
    with manual_manager(str(tmp_path / "first"), block) as manager:
        save_once(manager, block)
    before = Usage.of(os.getpid())
    for number in range(2):
        with manual_manager(str(tmp_path / str(number)), block) as manager:
            save_once(manager, block)
        with manual_manager(str(tmp_path / str(number)), block) as manager:
            assert manager.restore()
            save_once(manager, block)
    after = Usage.of(os.getpid())
    assert (after.num_fds, after.num_threads) == (before.num_fds, before.num_threads)
    assert after.shared - before.shared < MIB
