"""Gradients that are never cleared are part of every later update, so they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, loss_of, trained, tried


def kept_grads(directory: str, kill: int) -> str:
    loader, model = data(), nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def update(manager: CFManager, batch: Any) -> None:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        loss_of(model, *batch).backward()
        manager.weight_update()

    trained(directory, kill, loader, update, epochs=2, model=model, opt=optimizer)
    return digest(model)


def cleared(directory: str, kill: int, **how: Any) -> str:
    loader, model = data(), nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with CFManager(directory, CFCheckpoint(model=model, opt=optimizer), **EVERY) as manager:
        for x, y in CFIterator(loader, cf_manager=manager):
            optimizer.zero_grad(**how)
            loss_of(model, x, y).backward()
            manager.weight_update()
        manager.wait()
    files = [path.name for path in Path(directory).glob("step-*/*")]
    return " ".join(name for name in files if "gradients" in name)


def test_kept_grads(tmp_path: Path) -> None:
    # The second kill comes right after the first checkpoint of a resumed run.
    trial = tried(kept_grads, tmp_path, kills=(6, 7))
    assert trial.is_exact
    assert not trial.warnings
    for start in (trial.whole, trial.resumed):
        assert sum("gradients are kept over the update" in text for text in start.infos) == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_before_the_next_backward_pass_are_not_saved(
    tmp_path: Path, set_to_none: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert cleared(str(tmp_path), 0, set_to_none=set_to_none) == ""
    assert "gradients" not in caplog.text
