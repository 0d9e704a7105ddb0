"""Many ranks that are told when the run ends: they stop at one step, and in time."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.processes import verify_all
from tests.acceptance.ranks import Life, Rank, run_well
from tests.patience import slowness
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.crash]


def train_until_stopped(rank: Rank) -> None:
    """Ranks in ``told`` have a deadline; with ``slurm``, all are in a job of SLURM."""
    settings = rank.settings
    config = tiny.config(rank)
    if rank.rank in settings.get("told", ()):
        config = replace(config, deadline=settings["deadline"])
    if "slurm" in settings:
        os.environ |= {"SLURM_JOB_ID": "42", "PATH": f"{rank.life.folder}/bin:/usr/bin:/bin"}
    with tiny.managed(rank, chk_freq=0, config=config) as (manager, job):
        manager.restore()
        limit_unix_s = settings.get("deadline", time.time()) + 100.0
        while not manager.stopped:
            assert time.time() < limit_unix_s
            job.update(manager)
            manager.step()
        rank.send("stopped", manager.global_step, manager.stats()["last_durable_step"])


def life(folder: Path, world: int = 2, **settings: Any) -> Life:
    return Life(train_until_stopped, folder, world, settings=settings)


def command(folder: Path, name: str, script: str) -> Path:
    """A shell script for the ranks' PATH, and where it notes its calls."""
    path, called = folder / "bin" / name, folder / f"{name}.called"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {called}\n{script}\n')
    path.chmod(0o755)
    return called


@pytest.mark.more
def test_all_ranks_stop_at_one_step_before_the_end_that_one_knows(tmp_path: Path) -> None:
    deadline = time.time() + 4.0 * slowness()
    heard = run_well(life(tmp_path, told=(1,), deadline=deadline, local=True))
    step, durable = heard[0].last("stopped")
    assert step == durable
    assert [one.last("stopped") for one in heard] == [(step, step)] * 2
    for chk_dir in tmp_path.glob("chk*"):
        assert verify_all(chk_dir) == [step]
        lines = (chk_dir / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        (stop,) = [event for event in events if event["kind"] == "stop"]
        assert stop["signal"] == "deadline (rank 1)"
        (committed,) = [event for event in events if event["kind"] == "committed"]
        assert committed["time_unix_s"] < deadline


def test_one_rank_asks_slurm_and_requeues_once_all_parts_are_durable(tmp_path: Path) -> None:
    asked = command(tmp_path, "squeue", "echo 0:04")
    requeued = command(tmp_path, "scontrol", f"ls {tmp_path}/chk > {tmp_path}/seen")
    heard = run_well(life(tmp_path, 3, slurm=True, config={"requeue": True}))
    step, _ = heard[0].last("stopped")
    assert [one.last("stopped") for one in heard] == [(step, step)] * 3
    # For the end, and before it requeues.
    assert asked.read_text().splitlines().count("-h -t all -j 42 -O TimeLeft,RestartCnt,State") == 2
    assert requeued.read_text().splitlines() == ["requeue 42"]
    assert f"step-{step:08d}" in (tmp_path / "seen").read_text().split()
