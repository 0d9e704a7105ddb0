"""The contract's ``updating()``: parameter writes that go through no hooked optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkfreq
from checkfreq.errors import SnapshotError, StateError
from tests.contract.conftest import Hold
from tests.contract.runs import Training, managed

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


def test_it_counts_as_an_attempted_update_whatever_is_raised_inside(chk_dir: Path) -> None:
    training = Training()
    with managed(chk_dir, training.chk) as manager:
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
