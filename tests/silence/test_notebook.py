"""A notebook: cells run again, Ctrl-C is caught, and training goes on with the same objects."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

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


def interrupted(directory: str, at: int) -> tuple[str, int]:
    """Ctrl-C before the forward pass of update ``at``, or after its step; the cell is run again.

    The error is kept, as a notebook keeps the last one, and with it the variables of the cell.
    """
    torch.manual_seed(1)
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


def each_interrupted(directory: str, _: int) -> list[Any]:
    """Of three epochs of 8 updates; 0: never, negative: after the step."""
    places = (0, 1, -1, 5, 8, -8, 9, -24)
    return [interrupted(f"{directory}/{number}", at) for number, at in enumerate(places)]


def test_an_epoch_that_ctrl_c_left_goes_on_where_it_was(tmp_path: Path) -> None:
    run = start(each_interrupted, tmp_path)
    assert run.exit_code == 0, run.error
    assert run.result == [run.result[0]] * 8
    assert not run.warnings
