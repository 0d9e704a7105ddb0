"""A notebook: cells run again, Ctrl-C is caught, and training goes on with the same objects."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager
from checkfreq.errors import ConfigError
from tests.silence.training import EVERY


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
