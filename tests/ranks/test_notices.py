"""Many ranks that are told when the run ends: they stop at one step, and in time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.acceptance.ranks import Life, Rank, run_well
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.crash]


def train_until_stopped(rank: Rank) -> None:
    """In a job of SLURM."""
    os.environ |= {"SLURM_JOB_ID": "42", "PATH": f"{rank.life.folder}/bin:/usr/bin:/bin"}
    with tiny.managed(rank, chk_freq=0) as (manager, job):
        manager.restore()
        limit_unix_s = time.time() + 100.0
        while not manager.stopped:
            assert time.time() < limit_unix_s
            job.update(manager)
            manager.step()
        rank.send("stopped", manager.global_step, manager.stats()["last_durable_step"])


def command(folder: Path, name: str, script: str) -> Path:
    """A shell script for the ranks' PATH, and where it notes its calls."""
    path, called = folder / "bin" / name, folder / f"{name}.called"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {called}\n{script}\n')
    path.chmod(0o755)
    return called


def test_one_rank_asks_slurm_and_requeues_once_all_parts_are_durable(tmp_path: Path) -> None:
    asked = command(tmp_path, "squeue", "echo 0:04")
    requeued = command(tmp_path, "scontrol", f"ls {tmp_path}/chk > {tmp_path}/seen")
    settings = {"config": {"requeue": True}}
    heard = run_well(Life(train_until_stopped, tmp_path, 3, settings=settings))
    step, durable = heard[0].last("stopped")
    assert [one.last("stopped") for one in heard] == [(step, durable)] * 3
    assert durable == step
    # For the end, and before it requeues.
    assert asked.read_text().splitlines().count("-h -t all -j 42 -O TimeLeft,RestartCnt,State") == 2
    assert requeued.read_text().splitlines() == ["requeue 42"]
    assert f"step-{step:08d}" in (tmp_path / "seen").read_text().split()
