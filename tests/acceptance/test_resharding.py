"""What some ranks saved is, bit for bit, what other numbers of ranks restore."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import checkfreq
from iterators.testing import digest
from tests.acceptance import rank_training as training
from tests.acceptance.ranks import Life, run_well
from tests.acceptance.sizes import sized

pytestmark = [pytest.mark.dist]

CASES = [
    ("fsdp", 2, 1, False),
    ("fsdp", 2, 3, True),
    ("fsdp", 2, 2, False),
    ("fsdp", 1, 2, False),
    ("fsdp", 4, 2, False),
    ("fsdp", 2, 3, False),
    ("ddp", 3, 2, False),
    ("fsdp", 2, 2, True),
    ("fsdp", 4, 2, True),
    ("fsdp", 2, 1, True),
    ("ddp", 3, 2, True),
]

Save = Callable[..., tuple[Path, dict[str, str]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """The folder of a run that saved at a world, and the whole state there."""

    @cache
    def save(job: str, world: int, *, is_tree: bool = False) -> tuple[Path, dict[str, str]]:
        folder = tmp_path_factory.mktemp(f"saved-{job}-{world}")
        settings = {"job": job, "config": {"tree_from_ranks": 2 if is_tree else world + 2}}
        heard = run_well(Life(training.save_some, folder, world, settings=settings))
        states = [one.last("whole") for one in heard]
        assert states == [states[0]] * world
        return folder, states[0]

    return save


@pytest.mark.parametrize(
    ("job", "world", "other", "is_tree"), sized(CASES, smoke=lambda case: case in CASES[:2])
)
def test_the_whole_state_is_equal_at_another_world(
    job: str, world: int, other: int, is_tree: bool, saved: Save, tmp_path: Path
) -> None:
    folder, whole = saved(job, world, is_tree=is_tree)
    shutil.copytree(folder / "chk", tmp_path / "chk")
    heard = run_well(Life(training.restore_whole, tmp_path, other, 1, 1, settings={"job": job}))
    for one in heard:
        assert one.last("whole") == whole


def test_the_model_of_several_ranks_is_loaded_whole_without_any(saved: Save) -> None:
    folder, whole = saved("fsdp", 4)
    model: dict[str, Any] = checkfreq.load(folder / "chk", only=["model"])["model"]
    assert {f"model.{key}": digest(value) for key, value in model.items()} == {
        key: bits for key, bits in whole.items() if key.startswith("model.")
    }
