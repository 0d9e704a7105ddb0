"""Training goes on while slots are being pinned; a checkpoint that must be taken hurries it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from checkfreq import CFCheckpoint, CFManager
from checkfreq.snapshot.arena import Arena
from tests.contract.runs import config, managed
from tests.snapshot.test_arena import DEADLINE_S, RecordingPinner


@contextmanager
def run_of(tmp_path: Path, pinner: RecordingPinner, num_bytes: int) -> Iterator[CFManager]:
    """A run with a state of that size, whose slots ``pinner`` pins; a checkpoint at every step."""
    chk = CFCheckpoint(state={"table": torch.zeros(num_bytes, dtype=torch.uint8)})
    with managed(tmp_path, chk, config=config(arena_slack=0.0), chk_freq=1) as manager:
        arena_of(manager)._pinner = pinner
        yield manager


def arena_of(manager: CFManager) -> Arena:
    return manager._pipeline._arena


@pytest.fixture
def pinner() -> RecordingPinner:
    return RecordingPinner()


def test_while_slots_are_being_pinned_checkpoints_are_deferred_and_training_goes_on(
    tmp_path: Path, pinner: RecordingPinner
) -> None:
    pinner.is_deaf = True
    with run_of(tmp_path, pinner, 20 << 20) as manager:
        for _ in range(3):
            manager.step()
        assert pinner.has_begun.wait(DEADLINE_S)
        assert manager._pipeline.num_deferred == 1
        assert manager._pipeline.last_started_step == 0
        pinner.gate.set()
        assert arena_of(manager).wait_ready(timeout_s=DEADLINE_S)
        manager.step()
        assert manager._pipeline.last_started_step == 4


def test_a_checkpoint_that_the_user_asks_for_hurries_the_pinning(
    tmp_path: Path, pinner: RecordingPinner
) -> None:
    pinner.until_hurried = True
    with run_of(tmp_path, pinner, 20 << 20) as manager:
        manager.save(wait=True)
        assert [slot.pins is not None for slot in arena_of(manager).slots] == [True, False]
