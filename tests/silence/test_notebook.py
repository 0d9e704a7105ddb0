"""A notebook: cells run again, Ctrl-C is caught, and training goes on with the same objects."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from checkfreq.errors import ConfigError
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, loss_of, start


def test_a_second_manager_of_this_process_is_refused_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    manager = CFManager(tmp_path, chk, **EVERY)
    manager.restore()
    manager.step()
    with pytest.raises(ConfigError, match=r"this process has .* open already.*close\(\)"):
        CFManager(tmp_path, chk, **EVERY)
    manager.step()
    manager.close()
    assert "waiting" not in caplog.text
    with CFManager(tmp_path, chk, **EVERY) as third:
        assert third.restore()
        assert third.global_step == 2
    assert not [one for one in caplog.records if one.levelno > logging.WARNING]


def train(directory: str, at: int) -> tuple[str, int]:
    """Ctrl-C before the forward pass of update ``at``, or after its step; the cell is run again.

    The error is kept, as a notebook keeps the last one, and with it the variables of the cell.
    """
    model = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters())
    errors: list[KeyboardInterrupt] = []
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(data(), cf_manager=manager, seed=1)

        def interrupt(update: int) -> None:
            if update == at and not errors:
                os.kill(os.getpid(), signal.SIGINT)

        def cell() -> None:
            turns = batches.epochs(3)
            for _ in turns:
                for x, y in batches:
                    update = manager.update_attempts + 1
                    interrupt(update)
                    optimizer.zero_grad()
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    interrupt(-update)

        manager.restore()
        try:
            cell()
        except KeyboardInterrupt as error:
            errors.append(error)
            cell()
        assert bool(errors) == bool(at)
    return digest(model, optimizer), manager.global_step


def test_an_epoch_that_ctrl_c_left_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = start(train, tmp_path / "whole")
    assert whole.exit_code == 0, whole.error
    for at in (1, -1, 5, 8, -8, 9, -24):  # of three epochs of 8 updates; negative: after the step
        run = start(train, tmp_path / str(at), kill=at)
        assert run.exit_code == 0, run.error
        assert run.result == whole.result, at
        assert not run.warnings
