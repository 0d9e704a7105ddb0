"""The contract's ``updating()``: parameter writes that go through no hooked optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkfreq
from checkfreq.errors import SnapshotError, StateError
from iterators import CFIterator
from tests.contract.conftest import Hold
from tests.contract.runs import Training, loader, managed

WEIGHT = r"model\.layers\.0\.weight"


def test_a_write_inside_it_comes_after_the_copy(chk_dir: Path, hold_trainer: Hold) -> None:
    training = Training()
    gate = hold_trainer("snapshot.copy_settled")
    with managed(chk_dir, training.chk) as manager:
        weight = training.model.layers[0].weight
        expected = weight.detach().clone()
        manager.save()
        gate.open()
        with manager.updating(), torch.no_grad():
            weight.clamp_(-0.01, 0.01)
    assert torch.equal(checkfreq.load(chk_dir, step=0)["model"]["layers.0.weight"], expected)


def test_it_counts_as_an_attempted_update(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk) as manager:
        with manager.updating():
            pass
        assert manager.update_attempts == 1
        with pytest.raises(StateError, match="between boundaries"):
            manager.save(wait=True)


def test_it_makes_a_boundary_due_for_an_iterator(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk) as manager:
        for _ in CFIterator(loader(), cf_manager=manager):
            with manager.updating():
                pass
        assert manager.global_step == 2  # the third is the epoch's last: still its tail
    assert manager.global_step == 3


def test_verify_settled_sees_a_write_that_came_before_the_copy(
    chk_dir: Path, hold_trainer: Hold
) -> None:
    training = Training()
    gate = hold_trainer("snapshot.copy_settled")
    with pytest.raises(SnapshotError, match=WEIGHT), managed(chk_dir, training.chk) as manager:
        manager.save()
        with torch.no_grad():
            training.model.layers[0].weight.add_(1)
        gate.open()
        with pytest.raises(StateError, match=r"model\.layers\.0\.weight"):
            training.update(manager)


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


def test_an_optimizer_inside_backward_is_bracketed_by_it(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=1) as manager:
        for _ in range(3):
            with manager.updating():
                training.backward()
                with torch.no_grad():
                    for parameter in training.model.parameters():
                        parameter -= 0.1 * parameter.grad  # type: ignore[operator]
                        parameter.grad = None
            manager.step()
        bits = training.bits()
    restored = Training(seed=1)
    with managed(chk_dir, restored.chk) as manager:
        manager.restore()
        assert manager.global_step == 3
        assert restored.bits() == bits


def test_an_exception_inside_it_passes_through(chk_dir: Path) -> None:
    with (
        managed(chk_dir, Training().chk) as manager,
        pytest.raises(ZeroDivisionError),
        manager.updating(),
    ):
        raise ZeroDivisionError
