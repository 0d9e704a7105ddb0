"""A rank that hangs, with the store in its process, keeps no other rank for good."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.acceptance.ranks import Life, Rank, Ranks
from tests.patience import slowness
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.crash]


def hangs_in(rank: Rank) -> None:
    """Rank 0 stops, as a debugger, a full swap or a dead node would have it, once the others came
    to the phase: the first one, or a later step."""

    def before(phase: str) -> None:
        if phase != rank.settings["phase"]:
            return
        (rank.life.folder / f"waits-{rank.rank}").touch()
        if rank.rank == 0:
            while len(list(rank.life.folder.glob("waits-*"))) < rank.world:
                pass
            os.kill(os.getpid(), signal.SIGSTOP)

    before("making the CFManager")
    with tiny.managed(rank, chk_freq=0) as (manager, job):
        manager.restore()
        for step in (1, 2):
            job.update(manager)
            before(f"step() at step {step}")
            manager.save()  # whatever the costs: the ranks meet at the next boundary
            manager.step()


@pytest.mark.parametrize(
    "phase",
    ["step() at step 2", pytest.param("making the CFManager", marks=pytest.mark.more)],
)
def test_a_rank_0_that_hangs_with_its_store_is_named_with_the_phase_by_all_others(
    phase: str, tmp_path: Path
) -> None:
    config = {"rank_timeout_s": 1.5 * slowness(), "meet_every_s": 0.2}
    settings = {"phase": phase, "config": config}
    with Ranks(Life(hangs_in, tmp_path, 3, settings=settings, store="rank 0")) as ranks:
        others = ranks.heard[1:]
        ranks.read_until(lambda: all(one.failure for one in others))
        assert not ranks.heard[0].failure, ranks.heard
        ranks.kill([0])
        ranks.finish()
    for one in others:
        assert one.failure is not None
        assert (one.failure.kind, one.failure.ranks) == ("RankError", (0,)), one.failure.trace
        assert one.failure.phase == phase
        assert "rank 0 did not come" in one.failure.text
