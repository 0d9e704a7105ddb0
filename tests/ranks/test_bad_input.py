"""What cannot go well with several ranks is said on all of them, soon and in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq import CFCheckpoint, CFManager, CFMode
from tests.acceptance.processes import verify_all
from tests.acceptance.ranks import Life, Rank, run, run_well
from tests.ranks import tiny

pytestmark = [pytest.mark.dist]

OFTEN = {"config": {"meet_every_s": 0.2}}


def failures(program: Any, folder: Path, world: int = 2, **settings: Any) -> list[Any]:
    """The errors with which all ranks ended."""
    heard = run(Life(program, folder, world, settings={**OFTEN, **settings}))
    assert [one.exit_code for one in heard] == [1] * world, heard
    return [one.failure for one in heard]


# ---- structures


def other_structure(rank: Rank) -> None:
    rank.arm_trainer()
    job = tiny.Tiny(rank)
    tracked = job.tracked()
    if rank.settings["what"] == "dtype":
        dtype = torch.float64 if rank.rank else torch.float32
        job.common["more"] = torch.zeros(2, dtype=dtype)
    elif rank.rank:
        tracked["teacher"] = {"x": torch.zeros(1)}
    chk = CFCheckpoint(per_rank=("own",), **tracked)
    settings: dict[str, Any] = {"mode": CFMode.MANUAL, "chk_freq": 1, "config": tiny.config(rank)}
    with CFManager(rank.chk_dir, chk, **settings) as manager:
        manager.restore()
        job.model[0].weight.grad = torch.zeros_like(job.model[0].weight)
        manager.weight_update()
        manager.step()
        manager.wait()


@pytest.mark.parametrize(("what", "named"), [("dtype", "more"), ("name", "teacher")])
def test_ranks_of_different_structure_are_refused_on_all_with_the_names(
    what: str, named: str, tmp_path: Path
) -> None:
    for failure in failures(other_structure, tmp_path, what=what):
        assert failure.kind in ("StateError", "ConfigError", "RankError"), failure.trace
        assert named in failure.text
        assert "rank 1" in failure.text
    assert verify_all(tmp_path / "chk") == []


# ---- directories and arguments


def own_directory(rank: Rank) -> None:
    """A directory for each rank, said to be shared."""
    rank.arm_trainer()
    chk = CFCheckpoint(**tiny.Tiny(rank).tracked())
    CFManager(rank.life.folder / f"own-{rank.rank}", chk, config=tiny.config(rank))


def test_directories_that_are_not_shared_are_refused_on_all_ranks(tmp_path: Path) -> None:
    for failure in failures(own_directory, tmp_path):
        assert failure.kind == "ConfigError", failure.trace
        assert "own-1" in failure.text
        assert "NODE_LOCAL" in failure.text
    assert list(tmp_path.glob("own-*/step-*")) == []


def other_arguments(rank: Rank) -> None:
    changes = {"mode": CFMode.AUTO, "chk_freq": None} if rank.rank == 1 else {}
    with tiny.managed(rank, **changes) as (manager, _):
        manager.restore()


def test_other_arguments_on_one_rank_are_refused_on_all(tmp_path: Path) -> None:
    for failure in failures(other_arguments, tmp_path):
        assert failure.kind == "ConfigError", failure.trace
        assert "mode" in failure.text
        assert "rank 1" in failure.text


# ---- ranks that are not there, or somewhere else


def only_rank_0(rank: Rank) -> None:
    if rank.rank == 0:
        with tiny.managed(rank) as (manager, _):
            manager.restore()


def test_a_manager_on_one_rank_only_ends_with_an_error_that_names_the_other(
    tmp_path: Path,
) -> None:
    settings = {"config": {"rank_timeout_s": 0.5}}  # waited out
    heard = run(Life(only_rank_0, tmp_path, settings=settings))
    failure = heard[0].failure
    assert failure is not None
    assert (failure.kind, failure.ranks) == ("RankError", (1,))
    assert "CFManager" in failure.text


# ---- what is restored


def restore(rank: Rank) -> None:
    with tiny.managed(rank, chk_freq=0) as (manager, _):
        try:
            manager.restore(rank.settings.get("step"))
        finally:
            rank.send("at", manager.global_step)


PART = "table.rank-00001.safetensors"


def test_a_missing_file_of_any_rank_is_an_error_on_all_or_makes_all_walk_back_together(
    tmp_path: Path,
) -> None:
    run_well(Life(tiny.train, tmp_path, settings={"steps": 3}))
    (tmp_path / "chk/step-00000003" / PART).unlink()
    for failure in failures(restore, tmp_path, step=3):  # which was asked for
        assert failure.kind in ("CorruptCheckpointError", "RankError"), failure.trace
        assert PART in failure.text
    heard = run_well(Life(restore, tmp_path, settings=OFTEN))
    assert [one.last("at") for one in heard] == [2, 2]
    assert (tmp_path / "chk/quarantine/step-00000003").is_dir()
