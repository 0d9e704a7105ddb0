"""A rank that hangs is named by all others in time, and the next start loses nothing durable."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from checkfreq import CFCheckpoint, CFManager, CFMode
from tests.acceptance.rank_training import bits_of
from tests.acceptance.ranks import Life, Rank, Ranks, config, run_well
from tests.patience import slowness

pytestmark = [pytest.mark.crash, pytest.mark.dist]

STEPS = 12
HUNG_AT = 7


def train(rank: Rank) -> None:
    """No collective but the manager's: what a hang meets is the next checkpoint."""
    torch.manual_seed(3)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    tracked = {"model": model, "optimizer": optimizer}
    chk = CFCheckpoint(**tracked)
    with CFManager(rank.chk_dir, chk, mode=CFMode.MANUAL, chk_freq=2, config=config(rank)) as man:
        man.restore()
        rank.send("from", man.global_step)
        while man.global_step < STEPS:
            if man.global_step == HUNG_AT and rank.rank == rank.settings.get("hung"):
                os.kill(os.getpid(), signal.SIGSTOP)
            model(torch.rand(2, 4)).square().sum().backward()
            man.weight_update()
            optimizer.zero_grad()
            man.step()
            man.wait()
            rank.send("durable", man.stats()["last_durable_step"] or 0)
    rank.send("end", bits_of(tracked))


def test_the_others_name_a_rank_that_hangs_and_the_next_start_goes_on_from_what_was_durable(
    tmp_path: Path,
) -> None:
    settings = {"config": {"rank_timeout_s": 2.0 * slowness()}}
    folders = [tmp_path / "whole", tmp_path / "hung"]
    for folder in folders:
        folder.mkdir()
    whole = run_well(Life(train, folders[0], 3, settings=settings))
    with Ranks(Life(train, folders[1], 3, settings={**settings, "hung": 1})) as ranks:
        heard = ranks.end_with(0)
    assert heard[0].failure is not None
    assert (heard[0].failure.kind, heard[0].failure.ranks) == ("RankError", (1,))
    durable = heard[0].last("durable")
    assert durable == HUNG_AT // 2 * 2
    again = run_well(Life(train, folders[1], 3, number=2, seed=2, settings=settings))
    assert [one.last("from") for one in again] == [durable] * 3
    assert [one.last("end") for one in again] == [one.last("end") for one in whole]
