"""Parameters in shared memory that another process has mapped, as in Hogwild training."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint
from checkfreq.state.sharers import warn_of_sharers
from tests.fork_server import FORK_SERVER


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)).share_memory()


def tracked(model: nn.Module, **declared: tuple[str, ...]) -> CFCheckpoint:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return CFCheckpoint(model=model, opt=optimizer, **declared)


def _hold(model: nn.Module, pipe: Connection) -> None:
    pipe.send(os.getpid())
    pipe.recv()
    del model


@contextmanager
def another(model: nn.Module) -> Iterator[int]:
    """A process that has the model too."""
    here, there = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(target=_hold, args=(model, there))
    process.start()
    try:
        yield here.recv()
    finally:
        here.send(None)
        process.join()
        process.close()


def test_another_process_is_named_with_the_parameters(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    with another(model) as pid:
        warn_of_sharers(tracked(model))
    (text,) = caplog.messages
    assert f"(pid {pid}): model.0.weight, model.0.bias" in text
    assert "and 2 more" in text
    assert 'CFCheckpoint(..., settled=("model",))' in text


def test_nothing_is_said_of_what_only_others_read_or_of_ordinary_memory(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    with another(model):
        warn_of_sharers(tracked(model, settled=("model",)))
    warn_of_sharers(tracked(nn.Linear(3, 1)))
    assert not caplog.messages
