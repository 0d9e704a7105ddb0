"""Buffers with ``persistent=False`` that training changes are saved, beside the state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from checkfreq.formats import to_safetensors
from tests.silence.training import EVERY, data, digest, loss_of, trained, tried


class Counting(nn.Linear):
    seen: torch.Tensor

    def __init__(self, size: int = 1) -> None:
        super().__init__(8, 3)
        self.register_buffer("seen", torch.zeros(size), persistent=False)
        self.register_buffer("tied", self.weight.detach(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x) / (1 + self.seen.log1p())


class CountingItsOwnWay(Counting):
    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


def train(directory: str, kill: int) -> str:
    loader = data()
    one, other = Counting(), CountingItsOwnWay()
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.05)

    def update(manager: CFManager, batch: Any) -> None:
        loss_of(one, *batch).backward()
        loss_of(other, *batch).backward()
        manager.weight_update()
        optimizer.zero_grad()

    trained(directory, kill, loader, update, one=one, other=other, opt=optimizer)
    return digest(one, other, one.seen, other.seen)


def test_nonpersistent(tmp_path: Path) -> None:
    trial = tried(train, tmp_path)
    assert trial.is_exact
    assert not trial.warnings


def test_they_are_in_no_state_dict_that_others_read(tmp_path: Path) -> None:
    model = Counting()
    with CFManager(tmp_path / "run", CFCheckpoint(model=model), **EVERY) as manager:
        manager.save(wait=True)
    step = tmp_path / "run" / "step-00000000"
    assert (step / "model.buffers.safetensors").exists()
    to_safetensors(tmp_path / "run", tmp_path / "exported.safetensors")
    for state in (
        safetensors.torch.load_file(step / "model.safetensors"),
        safetensors.torch.load_file(tmp_path / "exported.safetensors"),
        checkfreq.load(tmp_path / "run")["model"],
    ):
        assert state.keys() == {"weight", "bias"}
        model.load_state_dict(state, strict=True)


def test_one_that_does_not_fit_or_is_not_there_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CFManager(tmp_path, CFCheckpoint(model=Counting(size=3)), **EVERY) as manager:
        manager.save(wait=True)
    smaller, none, removed = Counting(size=2), Counting(), nn.Linear(8, 3)
    none.register_buffer("seen", None, persistent=False)
    for live, found in ((smaller, "float32[2]"), (none, "None"), (removed, "")):
        caplog.clear()
        with CFManager(tmp_path, CFCheckpoint(model=live), **EVERY) as manager:
            assert manager.restore()
        warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        said = f"model.seen, a buffer with persistent=False: live is {found}, where the checkpoint"
        assert len(warnings) == bool(found)
        assert said in "".join(warnings) or not found
    larger = nn.Linear(8, 3)
    larger.register_buffer("new", torch.ones(2), persistent=False)
    larger.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
    with CFManager(tmp_path, CFCheckpoint(model=larger), **EVERY) as manager:
        assert manager.restore()
        manager.save(wait=True)
    assert torch.equal(larger.get_buffer("new"), torch.ones(2))
