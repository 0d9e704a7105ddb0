"""SIGKILL of each trainer and each worker of a run, and of all at once, at every fault point.

See `kill_chains`; and what becomes of those who survive.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from checkfreq import faults
from tests.acceptance.processes import verify_all
from tests.acceptance.ranks import Heard, Life, Rank, Ranks, run, run_well
from tests.patience import slowness
from tests.ranks import tiny
from tests.ranks.kill_chains import (
    ORDER,
    Kill,
    Layout,
    kills_of,
    life_in,
    passes,
    run_chain,
    short,
)

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.more]

VICTIMS = ("trainer of rank 0", "trainer of rank 1", "worker of rank 0", "worker of rank 1", "all")
SHARED, OWN = Layout(), Layout(local=True)
#: In a directory of its own, each worker leads, and does the same.
ALIKE = (OWN, "worker of rank 1")


# ---- the matrix, several chains at a time: they mostly wait

LAYOUTS = {"a shared directory": SHARED, "a directory for each rank": OWN}
CHAINS = [(name, who) for name in LAYOUTS for who in VICTIMS if (LAYOUTS[name], who) != ALIKE]


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda name: passes(tmp_path_factory.mktemp("passes") / "run", LAYOUTS[name]))


@pytest.fixture(scope="module")
def chains(
    pool: ThreadPoolExecutor, reached: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Future[None]]:
    """Every chain, under way."""
    under_way = {}
    for name, victim in CHAINS:
        kills = kills_of(victim, reached(name))
        folder = tmp_path_factory.mktemp("chain")
        under_way[name, victim] = pool.submit(run_chain, folder, kills, LAYOUTS[name])
    return under_way


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "victim"), CHAINS)
def test_a_kill_at_any_point_leaves_the_old_set_or_one_more_and_the_run_continues(
    layout: str, victim: str, chains: dict[tuple[str, str], Future[None]]
) -> None:
    chains[layout, victim].result()


def test_every_point_is_passed_by_some_rank(reached: Any) -> None:
    expected = {*ORDER} - {*faults.POINTS_OF_A_MIRROR}
    assert {point for point, _ in reached("a shared directory")} == expected


def test_the_leader_alone_commits(reached: Any) -> None:
    by_member = {point for point, rank in reached("a shared directory") if rank == 1}
    assert not by_member & {
        "commit.link",
        "commit.rename",
        "commit.pointer",
        "prune.rename",
        "prune.sync",
        "prune.remove",
        "parts.merge",
    }
    assert {"parts.join", "parts.rename"} <= by_member


# ---- those who survive


@dataclass(frozen=True)
class Loss:
    """Who is lost, where, and where the store is that the ranks meet over."""

    rank: int
    point: str
    hit: int
    store: Any


LOSSES = [
    Loss(1, "meeting.say", 1, "agent"),
    Loss(1, "meeting.say", 8, "agent"),
    Loss(1, "meeting.hear", 8, "file"),
    Loss(1, "snapshot.copy_start", 2, "agent"),
    Loss(1, "socket.send", 2, "rank 0"),
    Loss(2, "socket.receive", 1, "agent"),
    Loss(0, "meeting.say", 8, "agent"),
    Loss(0, "meeting.hear", 8, "agent"),
    Loss(0, "snapshot.copy_start", 2, "file"),
    Loss(0, "socket.send", 2, "agent"),
    Loss(0, "meeting.say", 8, "rank 0"),
    Loss(0, "snapshot.copy_end", 2, "rank 0"),
]


@pytest.fixture(scope="module")
def losses(
    pool: ThreadPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> dict[Loss, Future[list[Heard]]]:
    """Every loss, under way."""

    def lose(loss: Loss) -> list[Heard]:
        config = {"rank_timeout_s": 3.0 * slowness(), "meet_every_s": 0.2}
        settings = {"steps": 1000, "config": config}
        scripts = {loss.rank: f"{loss.point}:kill-self:{loss.hit}"}
        folder = tmp_path_factory.mktemp("loss")
        return run(Life(tiny.train, folder, 3, 0, 0, settings, scripts, store=loss.store))

    return {loss: pool.submit(lose, loss) for loss in LOSSES}


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.rank}-{loss.point}-{loss.store}")
def test_a_lost_rank_ends_the_others_with_an_error_that_names_it_and_the_phase(
    loss: Loss, losses: dict[Loss, Future[list[Heard]]]
) -> None:
    heard = losses[loss].result()
    assert heard[loss.rank].exit_code == -signal.SIGKILL, heard
    for rank in {0, 1, 2} - {loss.rank}:
        failure = heard[rank].failure
        assert failure is not None, heard[rank]
        assert failure.kind in ("RankError", "PersistError"), failure.trace
        assert failure.phase
        assert failure.kind == "PersistError" or failure.ranks == (loss.rank,), failure.text
        assert f"rank {loss.rank}" in failure.text or f"rank(s) {loss.rank}" in failure.text


def test_a_missing_part_is_an_error_on_all_ranks_that_names_who_wrote_none(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    heard = run(
        Life(
            tiny.train,
            tmp_path,
            settings={
                "steps": 100_000,
                "config": {
                    "rank_timeout_s": 1.0 * slowness(),
                    "meet_every_s": 0.1,
                    "close_timeout_s": 1.0,
                },
                "manager": {"tolerate_failures": 0, "chk_freq": 2},
            },
            worker_faults={1: f"parts.write_manifest:pause-{gate}"},
        )
    )
    gate.touch()
    for one in heard:
        assert one.failure is not None, one
        assert "wrote no part within" in one.failure.text
        assert "1" in one.failure.text
    assert verify_all(tmp_path / "chk") == []
    assert os.listdir(tmp_path / "chk")


def kill_own_worker(rank: Rank) -> None:
    """Rank 0's worker is dead when step 2 is agreed: the others may be ahead of its successor."""
    with tiny.managed(rank) as (manager, job):
        manager.restore()
        for step in range(1, 6):
            job.update(manager)
            process = manager._persistence._client._process
            if rank.rank == 0 and step == 2 and process is not None:
                process.kill()
            manager.step()
        manager.wait()
    rank.send("num_failed", manager.stats()["num_failed"])


def test_parts_written_while_the_leaders_worker_is_replaced_are_not_lost(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        heard = run_well(Life(kill_own_worker, folder, settings={"config": short()}))
        assert [one.last("num_failed") for one in heard] == [0, 0]


def test_a_first_checkpoint_that_some_directories_never_got_does_not_end_the_run(
    tmp_path: Path,
) -> None:
    """Rank 1's directory is still empty: no checkpoint was ever one of all ranks."""
    kill = Kill("all", "commit.mkdir", 1)
    gate = tmp_path / "gate"
    life = kill.applied(life_in(tmp_path, 0, OWN, steps=1000), gate)
    with Ranks(life) as ranks:
        ranks.watch(Path(f"{gate}.reached"))
        ranks.watch(tmp_path / "chk-0/step-00000001/manifest.json")
        ranks.kill_workers()
        ranks.kill()
        ranks.finish()
    assert [verify_all(tmp_path / f"chk-{rank}")[:1] for rank in range(OWN.world)] == [[1], []]

    heard = run_well(life_in(tmp_path, 1, OWN, steps=4))

    assert [one.last("done")["last_durable_step"] for one in heard] == [4, 4]
