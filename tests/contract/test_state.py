"""The contract's "State": what CFCheckpoint takes, what it refuses, generators."""

from __future__ import annotations

import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkfreq
from checkfreq import CFCheckpoint
from checkfreq.errors import ConfigError, StateError
from tests.contract.conftest import Hold
from tests.contract.runs import Training, config, generator_bits, managed, written


def save_once(chk_dir: Path, chk: CFCheckpoint) -> None:
    with managed(chk_dir, chk) as manager:
        manager.save(wait=True)


def restore_once(chk_dir: Path, chk: CFCheckpoint) -> None:
    with managed(chk_dir, chk) as manager:
        assert manager.restore()


def test_plain_dicts_are_restored_in_place(chk_dir: Path) -> None:
    best = torch.tensor([1.0, float("nan")])
    saved = OrderedDict({"best": best, "epoch": 7, "note": ("a", {1: b"x"})})
    save_once(chk_dir, CFCheckpoint(run=saved))

    live = torch.zeros(2)
    run: OrderedDict[str, Any] = OrderedDict({"best": live, "extra": 1})
    restore_once(chk_dir, CFCheckpoint(run=run))

    assert run["best"] is live
    assert live.numpy().tobytes() == best.numpy().tobytes()
    assert run["epoch"] == 7
    assert run["note"] == ("a", {1: b"x"})
    assert "extra" not in run


def test_generators_of_python_numpy_and_torch_are_tracked_by_default(chk_dir: Path) -> None:
    written(chk_dir, 1)
    expected = generator_bits()
    draws = (random.random(), np.random.rand(), torch.rand(1).item())

    restore_once(chk_dir, Training(seed=1).chk)

    assert generator_bits() == expected
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == draws


def test_rng_false_leaves_the_generators_alone(chk_dir: Path) -> None:
    written(chk_dir, 1)
    training = Training(seed=1, rng=False)
    before = generator_bits()

    restore_once(chk_dir, training.chk)

    assert generator_bits() == before


@pytest.mark.gpu
def test_generators_of_accelerators_that_hold_tracked_tensors_are_tracked(chk_dir: Path) -> None:
    model = torch.nn.Linear(1, 1, device="cuda")
    torch.cuda._sleep(20_000_000)  # its work is still queued when the checkpoint is taken
    torch.rand(4, device="cuda")
    with managed(
        chk_dir, CFCheckpoint(model=model), config=config(verify_settled=False)
    ) as manager:
        manager.save(wait=True)
    expected = torch.rand(4, device="cuda")

    restore_once(chk_dir, CFCheckpoint(model=model))

    assert torch.equal(torch.rand(4, device="cuda"), expected)


def test_a_tensor_declared_settled_is_held_to_it(chk_dir: Path, hold_trainer: Hold) -> None:
    average = {"model": torch.zeros(10)}
    training = Training(average=average, settled=["average"])
    gate = hold_trainer("snapshot.copy_end")
    with managed(chk_dir, training.chk, chk_freq=1) as manager:
        training.update(manager)
        manager.step()
        gate.wait_reached()
        average["model"].fill_(1.0)
        gate.open()
        training.backward()
        with pytest.raises(StateError, match=r"average\.model.*volatile"):
            manager.weight_update()


def test_a_tensor_declared_volatile_is_complete_when_step_returns(
    chk_dir: Path, hold_trainer: Hold
) -> None:
    training = Training(volatile=["model.layers.0"])
    weight = training.model.layers[0].weight
    gate = hold_trainer("snapshot.copy_settled")
    with managed(chk_dir, training.chk, chk_freq=1) as manager:
        training.update(manager)
        manager.step()
        expected = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()
        gate.open()
        manager.wait()
    assert torch.equal(checkfreq.load(chk_dir)["model"]["layers.0.weight"], expected)


@pytest.mark.parametrize(
    ("declared", "found"),
    [
        ({"settled": ["modle.weight"]}, r"modle\.weight"),
        ({"volatile": ["modle.weight"]}, r"modle\.weight"),
        ({"per_rank": ["modle.weight"]}, r"modle\.weight"),
        ({"settled": ["model"], "volatile": ["model"]}, "settled and volatile"),
        ({"per_rank": ["run.loss"]}, r"'run\.loss' is inside of a dict.*expected 'run'"),
    ],
)
def test_a_declaration_of_nothing_tracked_of_two_kinds_or_of_a_part_is_refused(
    declared: dict[str, Any], found: str
) -> None:
    with pytest.raises(ConfigError, match=found):
        CFCheckpoint(model=torch.nn.Linear(1, 1), run={"loss": 1}, **declared)
