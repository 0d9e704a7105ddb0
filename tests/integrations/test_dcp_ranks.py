"""torch.distributed.checkpoint over checkfreq's directories, with real ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from checkfreq.store.store import CheckpointStore
from tests.integrations import ranks
from tests.integrations.support import same

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chk_dir = tmp_path_factory.mktemp("four")
    ranks.run(4, ranks.save_state, chk_dir)
    return chk_dir


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_any_number_of_ranks_loads_what_any_other_saved(
    tmp_path: Path, before: int, after: int
) -> None:
    ranks.run(before, ranks.save_state, tmp_path)
    assert ranks.run(after, ranks.load_both_ways, tmp_path) == [True] * after
    assert CheckpointStore(tmp_path).manifest(1).format_version == min(before, 2)


def test_two_ranks_load_what_four_saved(of_four: Path) -> None:
    assert ranks.run(2, ranks.load_both_ways, of_four) == [True, True]


def test_the_command_line_understands_a_checkpoint_of_four_ranks(of_four: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "checkfreq.cli", "verify", str(of_four)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    manifest = CheckpointStore(of_four).verify(1)
    assert (manifest.world, sorted(manifest.ranks)) == (4, [0, 1, 2, 3])


def test_fully_sharded_training_moves_to_a_different_number_of_ranks(tmp_path: Path) -> None:
    saved = ranks.run(2, ranks.save_training, tmp_path)
    loaded = ranks.run(1, ranks.load_training, tmp_path)
    assert all(same(one, saved[0]) for one in loaded)


NAMES = [
    name
    for name, _ in nn.Sequential(ranks.Block(), ranks.Block(), nn.Linear(6, 3)).named_parameters()
]


@pytest.mark.parametrize("split", [True])
def test_state_captured_on_two_ranks_is_loaded_by_any_number(tmp_path: Path, split: bool) -> None:
    saved = ranks.run(2, ranks.save_as_manager, tmp_path, split)
    names = {"optimizer": NAMES}
    for world in (1, 2):
        loaded = ranks.run(world, ranks.load_training, tmp_path, names)
        assert all(same(one, saved[0]) for one in loaded)
    assert ranks.run(2, ranks.load_note, tmp_path) == [0, 1]


@pytest.mark.parametrize(
    ("kind", "world"), [("THREAD", 2), pytest.param("PROCESS", 1, marks=pytest.mark.more)]
)
def test_a_save_in_the_background_is_whole(tmp_path: Path, kind: str, world: int) -> None:
    assert ranks.run(world, ranks.save_in_background, tmp_path, kind) == [True] * world


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    for found in ranks.run(2, ranks.failures, tmp_path, "steps"):
        assert "must be the same on all ranks" in found[1]
    assert CheckpointStore(tmp_path).steps() == []


def test_a_save_that_failed_on_another_rank_is_no_obstacle_to_the_next(tmp_path: Path) -> None:
    for first, second in ranks.run(2, ranks.save_after_a_failure, tmp_path):
        assert "StateError: b:" in first[1]
        assert second == {}
    assert CheckpointStore(tmp_path).steps() == [1]
    assert not list(tmp_path.glob(".tmp-*"))


def test_ranks_that_read_different_steps_are_told(tmp_path: Path) -> None:
    ranks.run(1, ranks.save_two_steps, tmp_path)
    for found in ranks.run(2, ranks.failures, tmp_path, "reads"):
        assert "ranks 0 and 1 of this load found different checkpoints" in found[0]


def test_damage_in_one_rank_s_part_reaches_every_rank(tmp_path: Path) -> None:
    ranks.run(2, ranks.save_state, tmp_path)
    file = tmp_path / "step-00000001" / "dcp.rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    for offset in range(4096, len(data)):
        data[offset] ^= 1
    file.write_bytes(data)
    for found in ranks.run(2, ranks.failures, tmp_path, "digest"):
        assert any("CorruptCheckpointError" in text for text in found.values())
