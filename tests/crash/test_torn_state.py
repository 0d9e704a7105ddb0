"""A snapshot is the state of one boundary, even if training goes on while it is copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from tests.acceptance.programs import Training

pytestmark = [pytest.mark.crash, pytest.mark.more]


class PausedCopy:
    """Holds the copy of the settled state back until the next weight update begins.

    Its hook is registered before the manager's, so the copy starts when the update is about to
    wait at the barrier. Without a barrier the update would come first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self.gate = folder / "copy may start"
        self.is_on = False
        optimizer.register_step_pre_hook(self._before_update)

    @property
    def script(self) -> str:
        return f"snapshot.copy_settled:pause-{self.gate}"

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_on:
            assert not self.gate.exists()
            self.gate.touch()
            self.is_on = False


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
    training: Training,
    manager: CFManager,
    paused: PausedCopy,
    fault_script: Callable[[str], None],
) -> str:
    """Pass a boundary, with the copy of its settled state held back; returns its digest."""
    training.update(manager)
    training.update(manager)
    fault_script(paused.script)
    manager.save()
    manager.step()
    paused.is_on = True
    return training.digest()


def restored_digest(chk_dir: Path) -> str:
    training = Training()
    with manager_of(training, chk_dir) as manager:
        assert manager.restore()
        return training.digest()


def test_statistics_changed_by_forward_during_a_slow_copy_are_restored_as_at_the_boundary(
    tmp_path: Path, fault_script: Callable[[str], None]
) -> None:
    training = Training()
    paused = PausedCopy(training.optimizer, tmp_path)
    with manager_of(training, tmp_path / "chk") as manager:
        boundary = paused_snapshot(training, manager, paused, fault_script)
        before = training.model[1].running_mean.clone()
        for _ in range(5):
            training.model(torch.randn(8, 16) + 100.0)
        training.extra["best"] = -1.0
        assert not torch.equal(before, training.model[1].running_mean)
        assert manager.stats()["num_in_flight"] == 1
        assert not paused.gate.exists()
        paused.gate.touch()
        paused.is_on = False
        manager.wait()
        assert manager.stats()["last_durable_step"] == 1
        training.update(manager)  # the clean exit would checkpoint the changed state
    assert restored_digest(tmp_path / "chk") == boundary


@pytest.mark.parametrize("how", ["weight_update", "optimizer.step", "updating"])
def test_an_update_during_a_slow_copy_waits_and_the_boundary_is_restored(
    how: str, tmp_path: Path, fault_script: Callable[[str], None]
) -> None:
    training = Training()
    paused = PausedCopy(training.optimizer, tmp_path)
    with manager_of(training, tmp_path / "chk") as manager:
        boundary = paused_snapshot(training, manager, paused, fault_script)
        if how == "weight_update":
            training.update(manager)
        elif how == "optimizer.step":
            direct_update(training)
        else:
            paused.gate.touch()
            with manager.updating(), torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.zero_()
        assert training.digest() != boundary
        assert manager.stats()["stall_s"] > 0
        manager.wait()
        assert manager.stats()["last_durable_step"] == 1
    assert restored_digest(tmp_path / "chk") == boundary


def test_a_second_direct_update_before_the_boundary_changes_nothing_either(
    tmp_path: Path, fault_script: Callable[[str], None]
) -> None:
    training = Training()
    paused = PausedCopy(training.optimizer, tmp_path)
    with manager_of(training, tmp_path / "chk") as manager:
        boundary = paused_snapshot(training, manager, paused, fault_script)
        direct_update(training)
        direct_update(training)
        manager.wait()
    assert restored_digest(tmp_path / "chk") == boundary
