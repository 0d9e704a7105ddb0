"""What the manager does, all ranks do: the same steps, the same failures, the same end."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq import CFMode
from checkfreq.store.store import CheckpointStore
from tests.acceptance.processes import verify_all
from tests.acceptance.ranks import Heard, Life, Rank, Ranks, run, run_well
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.crash]


def life(program: Any, folder: Path, world: int = 2, **settings: Any) -> Life:
    return Life(program, folder, world, settings=settings)


# ---- calls


def every_call(rank: Rank) -> None:
    """With metrics that are each rank's own, at a boundary and between two; only rank 0 pins."""
    heard = tiny.Warnings()
    logging.getLogger("checkfreq").addHandler(heard)
    metrics = {"loss": 0.5 + rank.rank, "diverged": float("nan")}
    with tiny.managed(rank, chk_freq=0) as (manager, job):
        assert not manager.restore()
        for _ in range(2):
            job.update(manager)
            manager.save(metrics=metrics)  # between boundaries: at the next
            manager.step()
        manager.wait()
        rank.send("waited", manager.stats()["last_durable_step"], manager.all_steps())
        job.update(manager)
        manager.step()
        manager.save(wait=True, metrics=metrics, keep=rank.rank == 0)
        rank.send("saved", manager.stats()["last_durable_step"], manager.latest_step())
        job.update(manager)
        manager.step()
    rank.send("closed", manager.stats()["last_durable_step"])
    rank.send("counts", manager.stats()["num_committed"], manager.stats()["num_failed"])
    rank.send("warned", heard.texts)


def test_every_call_has_the_same_outcome_on_all_ranks(tmp_path: Path) -> None:
    """Rank 0's metrics and pins are stored in every directory, and a difference is said once."""
    heard = run_well(life(every_call, tmp_path, local=True))
    for rank, one in enumerate(heard):
        assert one.last("waited") == (2, [1, 2])
        assert one.last("saved") == (3, 3)
        assert one.last("closed") == 4
        assert one.last("counts") == (4, 0)
        chk_dir = tmp_path / f"chk-{rank}"
        assert verify_all(chk_dir) == [1, 2, 3, 4]  # the third is pinned
        marks = CheckpointStore(chk_dir).marks()
        assert [marks[step].metrics["loss"] for step in (1, 2, 3)] == [0.5] * 3
        assert [marks[step].keep for step in (1, 2, 3)] == [False, False, True]
    (warning,) = heard[0].last("warned")
    assert "loss is 0.5 on rank 0, 1.5 on rank 1" in warning
    assert "diverged" not in warning
    assert heard[1].last("warned") == []


def train_and_tell(rank: Rank) -> None:
    """The end of the training, however it ends, with the boundary it was at."""
    with tiny.managed(rank, chk_freq=rank.settings.get("chk_freq", 2)) as (manager, job):
        if manager.restore():
            rank.send("restored", manager.global_step, job.bits())
        for _ in range(rank.settings.get("most", 100_000)):
            if manager.should_stop:
                break
            job.update(manager)
            rank.send("boundary", manager.global_step + 1, job.bits())
            manager.step()
            if rank.rank == rank.settings.get("raising") and manager.global_step == 5:
                raise KeyError("a bug of rank 1's own")
        rank.send("stopped", manager.global_step, manager.should_stop)
    rank.send("durable", manager.stats()["last_durable_step"])


def test_a_stop_signal_to_one_rank_stops_all_at_the_same_step(tmp_path: Path) -> None:
    with Ranks(life(train_and_tell, tmp_path, config={"meet_every_s": 0.1})) as ranks:
        ranks.read_until(lambda: len(ranks.heard[0].all("boundary")) == 5)
        os.kill(ranks.pid(1), signal.SIGTERM)
        heard = ranks.finish()
    assert [one.exit_code for one in heard] == [0, 0], heard
    (step, stops), other = heard[0].last("stopped"), heard[1].last("stopped")
    assert (step, stops) == other
    assert stops
    assert [one.last("durable") for one in heard] == [step, step]
    assert verify_all(tmp_path / "chk")[-1] == step
    again = run_well(Life(train_and_tell, tmp_path, number=1, seed=1, settings={"most": 2}))
    for one, before in zip(again, heard, strict=True):
        assert one.last("restored") == before.last("boundary")


def test_an_error_of_one_rank_ends_the_others_with_an_error_that_names_it(tmp_path: Path) -> None:
    heard = run(life(train_and_tell, tmp_path, raising=1, config={"meet_every_s": 0.1}))
    assert [one.exit_code for one in heard] == [1, 1]
    assert failure_of(heard[1]).kind == "KeyError"
    failure = failure_of(heard[0])
    assert (failure.kind, failure.ranks) == ("RankError", (1,))
    assert failure.phase
    assert "rank 1" in failure.text
    verify_all(tmp_path / "chk")


def failure_of(heard: Heard) -> Any:
    assert heard.failure is not None, heard
    return heard.failure


# ---- decisions


def decide(rank: Rank) -> None:
    """AUTO, with iterations that take a bit longer on rank 1."""
    with tiny.managed(rank, mode=CFMode.AUTO, chk_freq=None, max_overhead=0.9) as (manager, job):
        manager.restore()
        for _ in range(60):
            job.update(manager)
            if rank.rank == 1:
                torch.randn(20_000).sort()
            manager.step()
        manager.wait()
    stats = manager.stats()
    rank.send("counts", *(stats[f"num_{what}"] for what in ("committed", "failed", "deferred")))


@pytest.mark.more
def test_auto_takes_the_same_checkpoints_on_all_ranks(tmp_path: Path) -> None:
    heard = run_well(life(decide, tmp_path))
    assert heard[0].last("counts") == heard[1].last("counts")
    num_committed, num_failed, _ = heard[0].last("counts")
    assert num_committed >= 2
    assert num_failed == 0


def lag(rank: Rank) -> None:
    """Rank 1's worker stands still until rank 0 has passed enough boundaries."""
    gate = rank.life.folder / "gate"
    with tiny.managed(rank, chk_freq=1) as (manager, job):
        manager.restore()
        for _ in range(8):
            job.update(manager)
            manager.step()
        rank.send("deferred", manager.stats()["num_deferred"])
        gate.touch()
        manager.wait()
        job.update(manager)
        manager.step()
    rank.send("counts", manager.stats()["num_deferred"], manager.stats()["num_failed"])
    rank.send("durable", manager.stats()["last_durable_step"])


def test_a_late_persist_of_one_rank_defers_the_next_on_all(tmp_path: Path) -> None:
    script = f"worker.receive:pause-{tmp_path / 'gate'}"
    heard = run_well(Life(lag, tmp_path, worker_faults={1: script}))
    assert heard[0].last("deferred") == heard[1].last("deferred") >= 1
    assert heard[0].last("counts") == heard[1].last("counts")
    assert heard[0].last("counts")[1] == 0
    assert [one.last("durable") for one in heard] == [9, 9]


# ---- failures


def fail(rank: Rank) -> None:
    with tiny.managed(rank, chk_freq=1, tolerate_failures=2) as (manager, job):
        manager.restore()
        for _ in range(4):
            job.update(manager)
            manager.step()
            manager.wait()
            rank.send("passed", manager.global_step)


@pytest.mark.parametrize(
    ("local", "failing"), [(False, 1), pytest.param(True, 0, marks=pytest.mark.more)]
)
def test_persists_that_fail_on_one_rank_count_and_raise_on_all(
    local: bool, failing: int, tmp_path: Path
) -> None:
    heard = run(
        Life(
            fail,
            tmp_path,
            settings={"local": local, "config": {"rank_timeout_s": 1.0}},
            worker_faults={failing: "commit.write:raise-ENOSPC:*"},
        )
    )
    assert heard[0].all("passed") == heard[1].all("passed") == [1, 2], heard
    assert failure_of(heard[failing]).kind == "PersistError"
    assert "No space left" in failure_of(heard[failing]).text
    assert failure_of(heard[1 - failing]).kind in ("PersistError", "RankError")
    assert re.search(rf"rank(\(s\))? {failing}", failure_of(heard[1 - failing]).text)
    for chk_dir in tmp_path.glob("chk*"):
        verify_all(chk_dir)


def test_checkpoints_go_on_once_a_failure_is_over(tmp_path: Path) -> None:
    heard = run_well(
        Life(
            tiny.train,
            tmp_path,
            settings={
                "steps": 6,
                "manager": {"tolerate_failures": 2},
                "config": {"rank_timeout_s": 1.0},
            },
            worker_faults={1: "commit.sync_payload:raise-EIO"},
        )
    )
    for one in heard:
        assert one.last("done")["num_failed"] == 1
        assert one.last("done")["last_durable_step"] == 6
    events = [json.loads(line) for line in (tmp_path / "chk/events.jsonl").read_text().splitlines()]
    (failed,) = [event for event in events if event["kind"] == "failed"]
    assert "rank 1 wrote no part" in failed["error"]
    assert "Input/output error" in failed["error"]


def save_twice(rank: Rank) -> None:
    """The last checkpoint is tried again; the directories must hold the same attempt of it."""
    with tiny.managed(rank, chk_freq=0) as (manager, job):
        if manager.restore():
            rank.send("restored", manager.global_step, job.bits())
        job.update(manager)
        manager.step()
        rank.send("boundary", manager.global_step, job.bits())


@pytest.mark.more
def test_a_step_that_one_directory_failed_is_taken_again_in_all_of_them(tmp_path: Path) -> None:
    first = Life(
        save_twice,
        tmp_path,
        settings={"local": True, "config": {"rank_timeout_s": 5.0}},
        worker_faults={1: "commit.sync_payload:raise-EIO"},
    )
    ended = [one.last("boundary") for one in run_well(first)]
    again = run_well(Life(save_twice, tmp_path, number=1, settings={"local": True}))
    assert [one.last("restored") for one in again] == ended


def own_of(job: tiny.Tiny) -> Any:
    """What is each rank's own: what was declared so, and the generators."""
    return dict(job.own), random.getstate(), torch.get_rng_state().tolist()


def come_back(rank: Rank) -> None:
    """Restore, say whether the own state is as it was found, train a step, and save it."""
    with tiny.managed(rank, chk_freq=0) as (manager, job):
        before, common = own_of(job), job.common["count"]
        restored = manager.restore()
        rank.send("kept", own_of(job) == before, restored, job.common["count"] - common)
        job.own["drawn"] = (f"by {rank.rank} of {rank.world}",)
        job.update(manager)
        manager.step()


def test_a_rank_that_is_new_keeps_what_is_its_own_also_after_a_run_of_one(tmp_path: Path) -> None:
    for number, world in enumerate((1, 2)):
        heard = run_well(Life(come_back, tmp_path, world, number, seed=number))
        assert [one.last("kept") for one in heard] == [
            (rank >= world - 1, number > 0, number) for rank in range(world)
        ]
