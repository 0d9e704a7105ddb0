"""Updates that reach no hook: nothing torn becomes durable, and the user is told once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager, KeepLast
from checkfreq.errors import SnapshotError, StateError
from tests.contract.conftest import Hold
from tests.contract.runs import Training, config, managed, running

WARNED = "no update was seen"


class Filled:
    """A model of which every element has the value of the latest write."""

    def __init__(self) -> None:
        self.model = nn.Linear(300, 300)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.chk = CFCheckpoint(model=self.model, optimizer=self.optimizer)
        self.write(0)

    def write(self, value: float) -> None:
        """As a replayed graph, or anything else that no hook sees."""
        for parameter in self.model.parameters():
            parameter.data.fill_(value)

    def managed(self, chk_dir: Path, **changes: Any) -> CFManager:
        settings = {"chk_freq": 1, "retention": KeepLast(1000), "config": config(**changes)}
        return managed(chk_dir, self.chk, **settings)


def values(chk_dir: Path, step: int) -> list[float]:
    """The different values in a checkpoint's weight."""
    found: torch.Tensor = checkfreq.load(chk_dir, step=step)["model"]["weight"]
    return found.unique().tolist()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    return [text for text in found if WARNED in text]


def test_updates_that_no_hook_sees_are_warned_of_once_and_tear_nothing(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Filled()
    with run.managed(chk_dir, verify_settled=False) as manager:
        for step in range(1, 31):
            run.write(step)
            manager.step()
            if step % 3 == 0:
                manager.wait()
        steps = manager.all_steps()
    assert len(steps) >= 10
    assert [values(chk_dir, step) for step in steps] == [[float(step)] for step in steps]
    (warning,) = warnings(caplog)
    assert "model.weight" in warning
    assert "updating()" in warning


def test_after_an_iteration_without_an_update_the_snapshot_is_complete_when_step_returns(
    chk_dir: Path, hold_trainer: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    run = Filled()
    hold_trainer("snapshot.copy_settled")  # would hold the copy for good
    with run.managed(chk_dir, verify_settled=False) as manager:
        run.write(1)
        manager.step()
        run.write(2)  # straight after it
        manager.wait()
        assert values(chk_dir, 1) == [1.0]
    assert warnings(caplog) == []


def test_an_update_that_bypasses_a_hook_which_worked_voids_the_snapshot_it_tears(
    chk_dir: Path, hold_trainer: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    run = Filled()
    gate = hold_trainer("snapshot.copy_settled")
    with run.managed(chk_dir, verify_settled=False) as manager:
        with manager.updating():
            run.write(1)
        manager.step()
        gate.wait_reached()
        run.write(2)
        gate.open()
        manager.wait()
        assert manager.all_steps() == []
        manager.step()  # training goes on, and what comes next is complete at once
        run.write(3)
        manager.wait()
        with manager.updating():
            run.write(4)
        manager.step()
    assert [values(chk_dir, step) for step in (2, 3)] == [[2.0], [4.0]]
    (failure,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "model.weight" in failure.getMessage()
    assert "updating()" in failure.getMessage()


def test_verify_settled_reports_a_write_after_the_last_boundary_at_close(chk_dir: Path) -> None:
    run = Filled()
    manager = run.managed(chk_dir)
    manager.step()
    run.write(1)
    with pytest.raises(StateError, match=r"model\.weight.*updating\(\)"):
        manager.close()


def test_verify_settled_finds_any_torn_element_in_the_slot(
    chk_dir: Path, hold_trainer: Hold
) -> None:
    """One element that is not among those watched, written through ``data``."""
    run = Filled()
    gate = hold_trainer("snapshot.copy_settled")
    with pytest.raises(SnapshotError, match=r"model\.weight"), run.managed(chk_dir) as manager:
        manager.save()
        gate.wait_reached()
        element = run.model.weight.data[17, 123]
        element.fill_(5)
        gate.open()
        manager.wait()
        assert manager.all_steps() == []
        element.fill_(0)


# ---- ``updating()``: parameter writes that go through no hooked optimizer step


WEIGHT = r"model\.layers\.0\.weight"


def test_a_write_inside_it_comes_after_the_copy(chk_dir: Path, hold_trainer: Hold) -> None:
    gate = hold_trainer("snapshot.copy_settled")
    with running(chk_dir) as (training, manager):
        weight = training.model.layers[0].weight
        expected = weight.detach().clone()
        manager.save()
        gate.open()
        with manager.updating(), torch.no_grad():
            weight.clamp_(-0.01, 0.01)
    assert torch.equal(checkfreq.load(chk_dir, step=0)["model"]["layers.0.weight"], expected)


def test_it_counts_as_an_attempted_update_whatever_is_raised_inside(chk_dir: Path) -> None:
    with managed(chk_dir, Training().chk) as manager:
        with pytest.raises(ZeroDivisionError), manager.updating():
            raise ZeroDivisionError
        assert manager.update_attempts == 1
        with pytest.raises(StateError, match="between boundaries"):
            manager.save(wait=True)


def test_a_settled_write_outside_it_is_a_state_error_with_verify_settled(
    chk_dir: Path, hold_trainer: Hold
) -> None:
    training = Training()
    gate = hold_trainer("snapshot.copy_end")
    with pytest.raises(SnapshotError, match=WEIGHT), managed(chk_dir, training.chk) as manager:
        manager.save()
        gate.wait_reached()
        with torch.no_grad():
            training.model.layers[0].weight.zero_()
        gate.open()
        training.backward()
        with pytest.raises(StateError, match=r"model\.layers\.0\.weight.*updating\(\)"):
            manager.weight_update()
