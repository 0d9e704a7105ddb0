"""Ranks that restore from a mirror: all take the same step from the same place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.ranks import Life, run_well
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.crash]


def life(folder: Path, mirror: Path, number: int, *, steps: int, local: bool = False) -> Life:
    folder.mkdir(exist_ok=True)
    settings = {"steps": steps, "local": local, "config": {"mirror": mirror.as_uri()}}
    return Life(tiny.train, folder, number=number, seed=number, settings=settings)


def bits_at(folder: Path, mirror: Path, *, steps: int, local: bool = False) -> list[str]:
    """Train a first life; each rank's bits at its last boundary."""
    heard = run_well(life(folder, mirror, 0, steps=steps, local=local))
    return [one.last("boundary")[1] for one in heard]


@pytest.mark.parametrize("local", [pytest.param(False, marks=pytest.mark.more), True])
def test_ranks_on_new_machines_restore_the_same_bits(local: bool, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    expected = bits_at(tmp_path / "old", mirror, steps=3, local=local)
    prefixes = sorted(path.name for path in mirror.iterdir() if path.name.startswith("node-"))
    assert prefixes == (["node-0", "node-1"] if local else [])
    heard = run_well(life(tmp_path / "new", mirror, 1, steps=4, local=local))
    assert [one.last("restored") for one in heard] == [(3, bits) for bits in expected]


@pytest.mark.more
def test_a_step_that_is_damaged_here_comes_from_the_mirror_on_all_ranks(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    expected = bits_at(tmp_path / "run", mirror, steps=3)
    path = tmp_path / "run" / "chk" / "step-00000003" / "model.safetensors"
    path.write_bytes(bytes(len(path.read_bytes())))
    heard = run_well(life(tmp_path / "run", mirror, 1, steps=3))
    assert [one.last("restored") for one in heard] == [(3, bits) for bits in expected]
    assert (tmp_path / "run" / "chk" / "quarantine" / "step-00000003").is_dir()
