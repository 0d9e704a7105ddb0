"""The contract's ``checkfreq.load``, ``latest_step`` and ``all_steps``."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq.errors import ConfigError, CorruptCheckpointError, MismatchError, NoCheckpointError
from iterators.testing import digest
from tests.contract.conftest import Hold
from tests.contract.runs import Net, Training, running, written
from tests.contract.test_restore import flip


def by_name(state: Mapping[str, Any]) -> str:
    """A digest of a state dict; a file has its own order of names."""
    return digest(sorted(state.items()))


def test_it_returns_state_dicts_bit_for_bit_which_load_into_plain_torch_objects(
    chk_dir: Path,
) -> None:
    with running(chk_dir, chk_freq=1) as (training, manager):
        training.steps(manager, 2)
    saved = checkfreq.load(chk_dir)
    assert {*saved} == {"model", "optimizer", "scheduler", "rng"}
    for name, live in training.chk.tracked.items():
        assert by_name(saved[name]) == by_name(live.state_dict())
    other = Training(seed=1)
    other.model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved["optimizer"])
    assert digest(other.optimizer.state_dict()) == digest(saved["optimizer"])


def test_it_needs_no_lock_while_a_run_holds_the_directory(chk_dir: Path, hold_worker: Hold) -> None:
    gate = hold_worker("commit.rename")
    with running(chk_dir) as (training, manager):
        manager.save()
        gate.wait_reached()
        with pytest.raises(NoCheckpointError):
            checkfreq.load(chk_dir)
        gate.open()
        manager.wait()
        assert by_name(checkfreq.load(chk_dir)["model"]) == by_name(training.model.state_dict())


def test_it_changes_nothing_on_disk(chk_dir: Path) -> None:
    written(chk_dir, 3)
    flip(chk_dir, 3)

    def there() -> dict[str, bytes]:
        files = (path for path in chk_dir.rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}

    before = there()
    checkfreq.load(chk_dir)
    assert there() == before


def test_it_needs_no_training_code(chk_dir: Path) -> None:
    """In a process that has none of it and does not even import the manager."""
    written(chk_dir, 1)
    code = (
        "import sys, checkfreq\n"
        f"state = checkfreq.load({str(chk_dir)!r})\n"
        "assert state['model']['layers.0.weight'].shape == (8, 3)\n"
        "assert 'checkfreq.manager' not in sys.modules and 'tests' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_step_chooses_a_checkpoint_and_a_step_directory_is_a_path(chk_dir: Path) -> None:
    written(chk_dir, 3)
    second = checkfreq.load(chk_dir, step=2)
    assert digest(second) != digest(checkfreq.load(chk_dir))
    assert digest(checkfreq.load(chk_dir / "step-00000002")) == digest(second)


def test_only_and_rank_limit_what_is_returned_to_what_there_is(chk_dir: Path) -> None:
    written(chk_dir, 1)
    assert [*checkfreq.load(chk_dir, only=["model"])] == ["model"]
    with pytest.raises(ConfigError, match="modle"):
        checkfreq.load(chk_dir, only=["modle"])
    assert digest(checkfreq.load(chk_dir, rank=0)) == digest(checkfreq.load(chk_dir))
    with pytest.raises(ConfigError, match="nothing of rank 1; expected one of 0"):
        checkfreq.load(chk_dir, rank=1)


def test_into_loads_live_objects_in_place_if_they_fit_or_what_of_them_fits(chk_dir: Path) -> None:
    written(chk_dir, 1)
    model = Net()
    weight = model.layers[0].weight
    saved = checkfreq.load(chk_dir, into={"model": model})
    assert model.layers[0].weight is weight
    assert by_name(model.state_dict()) == by_name(saved["model"])
    model = Net()
    model.layers[4] = nn.Linear(8, 2)
    before = by_name(model.state_dict())
    with pytest.raises(MismatchError, match=r"layers\.4\.weight"):
        checkfreq.load(chk_dir, into={"model": model})
    assert by_name(model.state_dict()) == before
    checkfreq.load(chk_dir, into={"model": model}, strict=False)
    assert torch.equal(model.layers[0].weight, saved["model"]["layers.0.weight"])


def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(chk_dir, 2)
    expected = digest(checkfreq.load(chk_dir, step=1))
    flip(chk_dir, 2)
    with caplog.at_level(logging.WARNING):
        assert digest(checkfreq.load(chk_dir)) == expected
    assert "step 2 is skipped" in caplog.text
    with pytest.raises(CorruptCheckpointError):
        checkfreq.load(chk_dir, step=2)


def test_a_directory_without_checkpoints_is_an_error_that_names_it(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NoCheckpointError, match=str(path)):
            checkfreq.load(path)
    assert not (tmp_path / "nowhere").exists()
