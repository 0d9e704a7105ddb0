"""Code after the loop that needs a variable of the loop, in a run killed after its last checkpoint.

The script fails from then on; the restore that leads there says that nothing is left to train.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, data, loss_of, start


def train(directory: str, kill: int) -> float:
    loader = data()
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        manager.restore()
        for _ in batches.epochs(2):
            for x, y in batches:
                loss = loss_of(model, x, y)
                loss.backward()
                manager.weight_update()
                optimizer.zero_grad()
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss.item()


def test_a_restore_that_leaves_nothing_to_train_says_so(tmp_path: Path) -> None:
    killed = start(train, tmp_path / "chk", kill=1)
    assert killed.exit_code == -signal.SIGKILL, killed.error
    again = start(train, tmp_path / "chk")
    assert "UnboundLocalError" in again.error
    assert any("variables that only it sets do not exist after it" in text for text in again.infos)
