"""A signal to the whole process group: loader workers get it too, and may die of it first."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from checkfreq import CFCheckpoint, CFManager, CFMode
from tests.acceptance.processes import verify_all
from tests.acceptance.ranks import Life, Rank, Ranks
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.crash]

NUM_BATCHES = 200_000  # no run comes to its end


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Single numbers, each in memory of its own: a batch is of no use once its worker is gone."""

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index % 7))


def train(rank: Rank) -> None:
    """Without an iterator of ours."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    config = tiny.config(rank)
    with CFManager(rank.chk_dir, chk, mode=CFMode.MANUAL, chk_freq=1, config=config) as manager:
        for batch in DataLoader(Numbers(), 1, num_workers=2):
            model(batch).mean().backward()
            manager.weight_update()
            if manager.latest_step():
                lose_workers()
            manager.step()


def lose_workers() -> None:
    """The workers get the signal first, and their deaths are noticed before it comes here."""
    noticed = threading.Event()

    def then_stop() -> None:
        noticed.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=then_stop).start()
    workers = [str(worker.pid) for worker in active_children()]
    try:
        subprocess.run(["kill", "-TERM", *workers], check=True)  # not by their parent
        threading.Event().wait(30)
    finally:
        noticed.set()


def test_workers_that_die_of_the_signal_before_it_comes_to_the_trainer_are_no_error(
    tmp_path: Path,
) -> None:
    with Ranks(Life(train, tmp_path, 1)) as ranks:
        (one,) = ranks.finish()
    assert one.failure is not None
    assert (one.failure.kind, one.failure.text) == ("SystemExit", "75"), one.failure.trace
    assert verify_all(tmp_path / "chk")
