"""Two ranks restore together: what stops one of them in the middle of its reads stops both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkfreq.errors import CheckFreqError, StateError
from checkfreq.store.store import CheckpointStore
from tests.acceptance.processes import verify_all
from tests.acceptance.ranks import Heard, Life, Rank, run, run_well
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.more]

WORLD, STEPS = 2, 2


def restore_and_ask(rank: Rank) -> None:
    """Report how a restore ends, and whether the manager goes on after a failure."""
    with tiny.managed(rank) as (manager, objects):
        try:
            manager.restore()
        except CheckFreqError as error:
            rank.send("error", type(error).__name__, str(error))
            try:
                manager.step()
            except CheckFreqError as refusal:
                rank.send("refused", isinstance(refusal, StateError), str(refusal))
            raise
        rank.send("restored", manager.global_step, objects.bits())


def life(folder: Path, number: int, program: Any = restore_and_ask, **settings: Any) -> Life:
    given = {"steps": STEPS, **settings}
    return Life(program, folder, WORLD, number, number, given)


@pytest.fixture
def trained(tmp_path: Path) -> list[Heard]:
    """What two ranks said that committed steps 1 and 2 in ``tmp_path / "chk"``."""
    heard = run_well(life(tmp_path, 0, tiny.train))
    assert verify_all(tmp_path / "chk") == [1, 2]
    return heard


def bits_of(heard: list[Heard], step: int) -> list[str]:
    return [dict(one.all("boundary"))[step] for one in heard]


def flip(chk_dir: Path, step: int, name: str) -> None:
    """Damage the last byte of a file: of its last tensor."""
    path = CheckpointStore(chk_dir).path(step) / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damage_that_one_rank_finds_has_both_load_all_of_the_older_step(
    tmp_path: Path, trained: list[Heard]
) -> None:
    flip(tmp_path / "chk", 2, "table.rank-00001.safetensors")
    heard = run_well(life(tmp_path, 1))
    assert [one.last("restored")[0] for one in heard] == [1, 1]
    assert [one.last("restored")[1] for one in heard] == bits_of(trained, 1)


def test_if_no_step_is_whole_every_rank_says_what_it_holds_and_goes_no_further(
    tmp_path: Path, trained: list[Heard]
) -> None:
    for step in (1, 2):
        flip(tmp_path / "chk", step, "table.rank-00001.safetensors")
    for one in run(life(tmp_path, 1)):
        assert one.last("error")[0] == "CorruptCheckpointError"
        assert "live objects hold parts of steps 2, 1" in one.last("error")[1]
        assert one.last("refused")[0]


def test_verified_first_no_rank_holds_anything_of_a_damaged_step(
    tmp_path: Path, trained: list[Heard]
) -> None:
    for step in (1, 2):
        flip(tmp_path / "chk", step, "table.rank-00001.safetensors")
    for one in run(life(tmp_path, 1, config={"verify_before_load": True})):
        assert one.last("error")[0] == "CorruptCheckpointError"
        assert "live objects" not in one.last("error")[1]
