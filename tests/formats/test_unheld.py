"""Parameters that only the optimizer held go through every format with its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from checkfreq.formats import from_dcp, from_torch_save, to_dcp, to_torch_save
from tests.silence.training import EVERY


def made(scale: float) -> tuple[CFCheckpoint, torch.Tensor]:
    """A checkpoint's objects after a step, and the parameter that only the optimizer holds."""
    model, alpha = nn.Linear(2, 1), torch.full((3,), scale, requires_grad=True)
    optimizer = torch.optim.Adam([alpha, *model.parameters()])
    (model(torch.ones(1, 2)).sum() * alpha.sum()).backward()
    optimizer.step()
    return CFCheckpoint(model=model, optimizer=optimizer), alpha


@pytest.mark.parametrize(
    ("to", "back", "file"),
    [(to_torch_save, from_torch_save, "all.pt"), (to_dcp, from_dcp, "folder")],
    ids=["torch.save", "dcp"],
)
def test_it_goes_there_and_back(tmp_path: Path, to: Any, back: Any, file: str) -> None:
    chk, alpha = made(2.0)
    with CFManager(tmp_path / "chk", chk, **EVERY) as manager:
        manager.save(wait=True)
    to(tmp_path / "chk", tmp_path / file)
    fresh, live = made(7.0)
    back(tmp_path / file, tmp_path / "again", like=fresh, step=3)
    loaded = checkfreq.load(tmp_path / "again")["optimizer"]
    assert torch.equal(loaded["parameters"][0], alpha)
    with CFManager(tmp_path / "again", fresh, **EVERY) as manager:
        assert manager.restore()
    assert torch.equal(live, alpha)
