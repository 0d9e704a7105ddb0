"""A snapshot is the state of one boundary, even if training goes on while it is copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from tests.acceptance.programs import Training
from tests.waiting import opened_while_waited_for

pytestmark = pytest.mark.crash


def manager_of(training: Training, chk_dir: Path) -> CFManager:
    return CFManager(
        chk_dir,
        CFCheckpoint(**training.tracked()),
        mode=CFMode.MANUAL,
        chk_freq=0,
        config=CFConfig(nice=0),
    )


def direct_update(training: Training) -> None:
    training.model(torch.randn(8, 16)).square().mean().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def paused_snapshot(
    training: Training, manager: CFManager, gate: Path, fault_script: Callable[[str], None]
) -> str:
    """Pass a boundary, with the copy of its settled state held back; returns its digest."""
    training.update(manager)
    training.update(manager)
    fault_script(f"snapshot.copy_settled:pause-{gate}")
    manager.save()
    manager.step()
    return training.digest()


def restored_digest(chk_dir: Path) -> str:
    training = Training()
    with manager_of(training, chk_dir) as manager:
        assert manager.restore()
        return training.digest()


@pytest.mark.parametrize("how", ["weight_update", "optimizer.step", "updating"])
def test_an_update_during_a_slow_copy_waits_and_the_boundary_is_restored(
    how: str, tmp_path: Path, fault_script: Callable[[str], None]
) -> None:
    training, gate = Training(), tmp_path / "copy may start"
    with manager_of(training, tmp_path / "chk") as manager:
        boundary = paused_snapshot(training, manager, gate, fault_script)
        with opened_while_waited_for(gate.touch):
            if how == "weight_update":
                training.update(manager)
            elif how == "optimizer.step":
                direct_update(training)
            else:
                with manager.updating(), torch.no_grad():
                    for parameter in training.model.parameters():
                        parameter.zero_()
        assert training.digest() != boundary
        assert manager.stats()["stall_s"] > 0
        manager.wait()
        assert manager.stats()["last_durable_step"] == 1
    assert restored_digest(tmp_path / "chk") == boundary
