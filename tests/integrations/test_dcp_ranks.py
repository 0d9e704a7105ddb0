"""torch.distributed.checkpoint over checkfreq's directories, with real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.store.store import CheckpointStore
from tests.integrations import ranks
from tests.integrations.support import same

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (4, 2)])
def test_any_number_of_ranks_loads_what_any_other_saved(
    tmp_path: Path, before: int, after: int
) -> None:
    ranks.run(before, ranks.save_state, tmp_path)
    assert ranks.run(after, ranks.load_both_ways, tmp_path) == [True] * after
    assert CheckpointStore(tmp_path).verify(1).world == before


def test_fully_sharded_training_moves_to_a_different_number_of_ranks(tmp_path: Path) -> None:
    saved = ranks.run(2, ranks.save_training, tmp_path)
    loaded = ranks.run(1, ranks.load_training, tmp_path)
    assert all(same(one, saved[0]) for one in loaded)


def test_what_a_manager_saved_on_two_ranks_is_loaded_by_any_number(tmp_path: Path) -> None:
    saved = ranks.run(2, ranks.save_as_manager, tmp_path)
    names = {"optimizer": [name for name, _ in ranks.layers().named_parameters()]}
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
    for found in ranks.run(2, ranks.save_different_steps, tmp_path):
        assert "must be the same on all ranks" in found[1]
    assert CheckpointStore(tmp_path).steps() == []


def test_a_save_that_failed_on_another_rank_is_no_obstacle_to_the_next(tmp_path: Path) -> None:
    for first, second in ranks.run(2, ranks.save_after_a_failure, tmp_path):
        assert "StateError: b:" in first[1]
        assert second == {}
    assert CheckpointStore(tmp_path).steps() == [1]
    assert not list(tmp_path.glob(".tmp-*"))
