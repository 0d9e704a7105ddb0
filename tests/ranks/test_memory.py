"""Killed ranks start again from what their workers keep in memory, all from the same step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkfreq import KeepLast
from checkfreq.persist import handover
from checkfreq.persist.handover import Offer
from tests.acceptance.processes import verify_all
from tests.acceptance.ranks import Heard, Life, Ranks, run_well
from tests.ranks import tiny

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.more]

WORLD = 2
STEPS = 6
DEADLINE_S = 200.0


@pytest.fixture(params=["shared", "node_local"])
def local(request: pytest.FixtureRequest) -> bool:
    """Whether each rank has a directory of its own."""
    return bool(request.param == "node_local")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the directories are; nothing that lingers there outlives the test."""
    yield tmp_path
    for chk_dir in tmp_path.glob("chk*"):
        handover.release_all(chk_dir)


def life_in(folder: Path, local: bool, number: int = 0, world: int = WORLD, **changes: Any) -> Life:
    config = {"keep_in_memory_s": 300.0, "rank_timeout_s": 60.0}
    settings = {"config": config, "local": local, "manager": {"retention": KeepLast(3)}}
    return Life(tiny.train, folder, world, number, number, {**settings, "steps": STEPS, **changes})


def directory_of(folder: Path, local: bool, rank: int) -> Path:
    return folder / (f"chk-{rank}" if local else "chk")


def offered(folder: Path, local: bool, rank: int) -> Offer:
    """What a killed rank's worker offers, once it has written all it had."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        offer = handover.ask(directory_of(folder, local, rank), rank, world=WORLD)
        if offer is not None and not offer.body.in_flight:
            return offer
        if offer is not None:
            offer.close()
        assert time.monotonic() < deadline_s, f"the worker of rank {rank} offers nothing"
        time.sleep(0.01)


def killed(life: Life) -> list[Heard]:
    """A life in which all trainers are killed once all know of a durable step."""
    with Ranks(replace(life, settings={**life.settings, "waits": True})) as ranks:
        ranks.read_until(lambda: all(len(one.all("boundary")) > 3 for one in ranks.heard))
        ranks.kill()
        return ranks.finish()


def bits_of(heard: list[Heard]) -> list[dict[int, str]]:
    return [dict(one.all("boundary")) for one in heard]


def expect_same_bits(before: list[dict[int, str]], heard: list[Heard]) -> int:
    """Every rank restored the same step with its own bits; returns the step."""
    (step,) = {one.last("restored")[0] for one in heard}
    for known, one in zip(before, heard, strict=True):
        assert one.last("restored")[1] == known[step]
        for number, bits in one.all("boundary"):
            assert known.get(number, bits) == bits
        assert one.last("done")["num_failed"] == 0
    return int(step)


@pytest.mark.parametrize("is_lost", [False, True])
def test_every_rank_goes_on_with_its_own_memory_and_one_that_has_none_from_the_disk(
    folder: Path, local: bool, is_lost: bool
) -> None:
    before = killed(life_in(folder, local))
    for rank in range(WORLD):
        offered(folder, local, rank).close()
    workers = [one.last("worker") for one in before]
    if is_lost:
        os.kill(workers[1], signal.SIGKILL)

    after = run_well(life_in(folder, local, 1))

    expect_same_bits(bits_of(before), after)
    assert [one.last("worker") == own for one, own in zip(after, workers, strict=True)] == [
        True,
        not is_lost,
    ]
    assert is_lost or [one.last("source") for one in after] == ["memory"] * WORLD
    for rank in range(WORLD):
        assert verify_all(directory_of(folder, local, rank))[-1] == STEPS


def test_a_step_that_was_complete_but_not_committed_is_waited_for(folder: Path) -> None:
    gate = folder / "gate"
    first = Life(
        **{**vars(life_in(folder, False)), "worker_faults": {0: f"commit.rename:pause-{gate}:2"}}
    )
    with Ranks(first) as ranks:
        ranks.watch(Path(f"{gate}.reached"))
        ranks.kill()
        before = ranks.finish()
    durable = verify_all(folder / "chk")
    assert len(durable) == 1
    with Ranks(life_in(folder, False, 1)) as ranks:
        ranks.read_until(lambda: all(one.all("worker") for one in ranks.heard))
        gate.touch()
        after = ranks.finish()
    assert expect_same_bits(bits_of(before), after) > durable[0]
    assert verify_all(folder / "chk")[-1] == STEPS
