"""SIGKILL of trainers and workers of a run of several ranks, and of all at once, at fault points.

Lives follow one another in one directory (or one per rank), each killed at a fault point. The next
continues from what the last one left. So every life is the check of the one before it: what it
restores was a boundary of all ranks, and no older than what was known to be durable. Once its
victim is dead the other trainers are killed, as a launcher does; workers finish by themselves.
And what becomes of those who survive.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from checkfreq import faults
from tests.acceptance.processes import verify_all, wait_unlocked
from tests.acceptance.ranks import Heard, Life, Rank, Ranks, Where, run, run_well
from tests.patience import slowness
from tests.ranks import tiny

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.more]

STEPS = 5  # of each life, from where it begins
ORDER = (*faults.POINTS, *faults.POINTS_OF_A_LINK)
TRAINERS = ("snapshot.", "socket.", "slot.", "meeting.", "restore.")


@dataclass(frozen=True)
class Layout:
    """How many ranks there are, whether each has a directory of its own, and what they run."""

    world: int = 2
    local: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    program: Callable[[Rank], None] = tiny.train


@dataclass
class History:
    """All that was ever said in one directory, by rank."""

    layout: Layout
    digests: list[dict[int, str]] = field(init=False)
    durable: int = 0

    def __post_init__(self) -> None:
        self.digests = [{} for _ in range(self.layout.world)]

    def take(self, heard: list[Heard], what: str) -> None:
        """Check a life against those before it, and add what it said."""
        restored = {one.last("restored")[0] for one in heard if one.all("restored")}
        assert len(restored) <= 1, f"{what}: the ranks restored different steps: {restored}"
        for rank, one in enumerate(heard):
            known = self.digests[rank]
            for step, digest in one.all("restored"):
                assert digest == known[step], f"{what}: rank {rank} restored no boundary"
                assert step >= self.durable, f"{what}: step {self.durable} is lost"
            if one.all("boundary") and not one.all("restored"):
                assert self.durable == 0, f"{what}: the run started over"
            for step, digest in one.all("boundary"):
                same = known.setdefault(step, digest)
                assert same == digest, f"{what}: step {step} of rank {rank} went otherwise"
        self.durable = max(self.durable, self.acknowledged(heard))

    def acknowledged(self, heard: list[Heard]) -> int:
        """The newest step that was known to be durable; where each rank has its own, on all."""
        newest = [max(one.all("durable"), default=0) for one in heard]
        return min(newest) if self.layout.local else max(newest)


@dataclass(frozen=True)
class Kill:
    """SIGKILL of ``victim`` when the trainer or worker of ``rank`` passes ``point``."""

    victim: str
    point: str
    rank: int
    hit: int = 1

    def applied(self, life: Life, gate: Path) -> Life:
        """The life with the fault scripts."""
        by_trainer = self.point.startswith(TRAINERS)
        if self.victim == "all":
            action = f"pause-{gate}"
        else:
            action = "kill-self" if by_trainer == self.victim.startswith("trainer") else "kill-peer"
        scripts = {self.rank: f"{self.point}:{action}:{self.hit}"}
        return replace(life, **{"trainer_faults" if by_trainer else "worker_faults": scripts})


def passes(folder: Path, layout: Layout) -> dict[tuple[str, int], int]:
    """How often an undisturbed life passes each point, by point and rank."""
    folder.mkdir(parents=True)
    life = life_in(folder, 0, layout)
    run_well(replace(life, settings={**life.settings, "steps": 3}))
    log = folder / "points"
    restored = replace(life_in(folder, 1, layout), fault_log=log)
    run_well(replace(restored, settings={**restored.settings, "restore": 2, "steps": 2 + STEPS}))
    found: dict[tuple[str, int], int] = {}
    for rank in range(layout.world):
        for process in ("trainer", "worker"):
            reached = Path(f"{log}-{process}-{rank}").read_text().split()
            for point in reached:
                found[point, rank] = found.get((point, rank), 0) + 1
    return found


def life_in(folder: Path, number: int, layout: Layout, seed: int = 0, **settings: Any) -> Life:
    # A successor may wait so long for parts that nobody will write any more.
    short = {"rank_timeout_s": 2.0 * slowness(), "takeover_s": 120.0}
    config: dict[str, Any] = {
        "config": {**short, **layout.config},
        "local": layout.local,
        "frozen": True,  # linked from checkpoint to checkpoint by whoever leads
    }
    return Life(layout.program, folder, layout.world, number, seed, {**config, **settings})


def kills_of(victim: str, reached: dict[tuple[str, int], int]) -> list[Kill]:
    """One kill per point that the victim passes; "all" dies at points of either rank in turn."""
    kills = []
    for (point, rank), count in sorted(reached.items(), key=lambda item: _place(*item[0])):
        if victim != "all" and not victim.endswith(str(rank)):
            continue
        # The second prune may come when the life is closing and looks no more. How often a restore
        # reads depends on what it finds.
        hits = {1 if point.startswith(("prune.", "restore.")) else min(2, count)}
        if point.startswith("meeting."):
            hits = set() if victim.startswith("worker") else {1, count // 2}
        kills += [Kill(victim, point, rank, hit) for hit in sorted(hits) if hit <= count]
    return kills[::3] if victim == "all" else kills


def _place(point: str, rank: int) -> tuple[int, int]:
    return ORDER.index(point), rank


def run_chain(folder: Path, kills: list[Kill], layout: Layout) -> None:
    """Kill a run once for each of ``kills``, in one directory, and bring it to an end."""
    history, step = History(layout), 2
    history.take(run_well(life_in(folder, 0, layout, steps=step)), "the first life")
    for number, kill in enumerate(kills, 1):
        what = f"{kill}, life {number}"
        settings: dict[str, Any] = {"steps": step + STEPS}
        if kill.point == "commit.supersede":
            settings["restore"] = history.durable = an_older_step(folder)
        life = kill.applied(life_in(folder, number, layout, **settings), folder / f"gate-{number}")
        heard = live(life, kill, folder / f"gate-{number}")
        history.take(heard, what)
        check_directories(folder, what)
        step = max([step, *(max(known, default=0) for known in history.digests)]) - 1
    last = life_in(folder, len(kills) + 1, layout, seed=1, steps=step + STEPS)
    heard = run_well(last)
    history.take(heard, "the last life")
    assert [one.last("done")["last_durable_step"] for one in heard] == [step + STEPS] * layout.world
    whole = folder / "whole"
    whole.mkdir()
    undisturbed = run_well(life_in(whole, 0, layout, steps=step + STEPS))
    for rank, one in enumerate(undisturbed):
        known = history.digests[rank]
        assert {s: bits for s, bits in one.all("boundary") if s in known} == known


def live(life: Life, kill: Kill, gate: Path) -> list[Heard]:
    """One life with its kill, which must have struck."""
    with Ranks(life) as ranks:
        if kill.victim.startswith("worker"):
            heard = ranks.finish()
            assert [one.exit_code for one in heard] == [0] * life.world, f"{kill}: {heard}"
            replaced = [one.last("done")["num_workers_replaced"] for one in heard]
            expected = [int(rank == kill.rank) for rank in range(life.world)]
            assert replaced == expected, f"{kill}: {heard}"
            failed = [one.last("done")["num_failed"] for one in heard]
            assert failed == [0] * life.world, f"{kill}: {heard}"
            return heard
        if kill.victim == "all":
            ranks.watch(Path(f"{gate}.reached"))
            heard = kill_all(ranks)
            gate.touch()  # for a worker whose process id nobody knew
            return heard
        heard = ranks.end_with(kill.rank)
        assert heard[kill.rank].exit_code == -signal.SIGKILL, f"{kill} was not reached: {heard}"
        return heard


def kill_all(ranks: Ranks) -> list[Heard]:
    """Trainers and workers at once: none lives on to replace a worker that was killed."""
    for rank in range(len(ranks.heard)):
        os.kill(ranks.pid(rank), signal.SIGSTOP)
    ranks.kill_workers()
    ranks.kill()
    return ranks.finish()


def an_older_step(folder: Path) -> int:
    """The newest but one that every directory holds; the newest if that is the only one."""
    held = [set(verify_all(chk_dir)) for chk_dir in folder.glob("chk*")]
    return sorted(set.intersection(*held))[-2:][0]


def check_directories(folder: Path, what: str) -> None:
    for chk_dir in folder.glob("chk*"):
        wait_unlocked(chk_dir)
        try:
            verify_all(chk_dir)
        except Exception as error:
            raise AssertionError(f"{what}: {chk_dir.name}: {error}") from error


# ---- the matrix, several chains at a time: they mostly wait

SHARED, OWN = Layout(), Layout(local=True)
#: Seven ranks meet in three levels: 0 over 1 and 4, each over two leaves. Each has a record of its
#: own, which the manifest names.
TREE = Layout(7, config={"tree_from_ranks": 2}, program=tiny.train_in_a_tree)
LAYOUTS = {"a shared directory": SHARED, "a directory for each rank": OWN, "a tree": TREE}
#: What one rank does alone is killed in `tests/acceptance/test_kill_matrix.py`.
CHAINS = [
    ("a shared directory", "trainer of rank 1"),
    ("a shared directory", "worker of rank 0"),
    ("a shared directory", "worker of rank 1"),
    ("a directory for each rank", "trainer of rank 0"),
    ("a directory for each rank", "all"),
    ("a tree", "worker of rank 0"),
    ("a tree", "worker of rank 1"),
]


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
        kills = kills_of(victim, reached(name))[:: 2 if LAYOUTS[name] is TREE else 1]
        folder = tmp_path_factory.mktemp("chain")
        under_way[name, victim] = pool.submit(run_chain, folder, kills, LAYOUTS[name])
    return under_way


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "victim"), CHAINS)
def test_a_kill_at_any_point_leaves_the_old_set_or_one_more_and_the_run_continues(
    layout: str, victim: str, chains: dict[tuple[str, str], Future[None]]
) -> None:
    chains[layout, victim].result()


def test_every_point_is_passed_and_the_leader_alone_commits(reached: Any) -> None:
    passed = reached("a shared directory")
    assert {point for point, _ in passed} == {*ORDER} - {*faults.POINTS_OF_A_MIRROR}
    by_member = {point for point, rank in passed if rank == 1}
    assert not {point for point in by_member if point.startswith("prune.")}
    assert not by_member & {"commit.link", "commit.rename", "commit.pointer", "parts.merge"}
    assert {"parts.join", "parts.rename"} <= by_member


# ---- those who survive


#: Who is lost, where, and where the store is that the ranks meet over.
LOSSES: list[tuple[int, str, Where]] = [
    (2, "socket.receive:kill-self:1", "agent"),
    (0, "meeting.say:kill-self:8", "rank 0"),
    (0, "snapshot.copy_start:kill-self:2", "file"),
]


@pytest.mark.parametrize(("lost", "script", "store"), LOSSES)
def test_a_lost_rank_ends_the_others_with_an_error_that_names_it_and_the_phase(
    lost: int, script: str, store: Where, tmp_path: Path
) -> None:
    config = {"rank_timeout_s": 3.0 * slowness(), "meet_every_s": 0.2}
    settings = {"steps": 1000, "config": config}
    heard = run(Life(tiny.train, tmp_path, 3, 0, 0, settings, {lost: script}, store=store))
    assert heard[lost].exit_code == -signal.SIGKILL, heard
    for rank in {0, 1, 2} - {lost}:
        failure = heard[rank].failure
        assert failure is not None, heard[rank]
        assert failure.kind in ("RankError", "PersistError"), failure.trace
        assert failure.phase
        assert failure.kind == "PersistError" or failure.ranks == (lost,), failure.text
        assert f"rank {lost}" in failure.text or f"rank(s) {lost}" in failure.text


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
        kill_all(ranks)
    assert [verify_all(tmp_path / f"chk-{rank}")[:1] for rank in range(OWN.world)] == [[1], []]

    heard = run_well(life_in(tmp_path, 1, OWN, steps=4))

    assert [one.last("done")["last_durable_step"] for one in heard] == [4, 4]
