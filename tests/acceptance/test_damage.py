"""Damaged and hostile directories: what was never saved is never restored, nothing else is hurt."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

import checkfreq
from checkfreq.errors import CheckFreqError
from tests.acceptance.command import checkfreq as command
from tests.acceptance.processes import Log, run_to_end, verify_all
from tests.acceptance.programs import Run
from tests.acceptance.sizes import sized

pytestmark = pytest.mark.crash

NUM_STEPS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Log]:
    """A directory with the checkpoints of steps 2 to 4, and the digests of a longer run."""
    folder = tmp_path_factory.mktemp("saved")
    run_to_end(Run(str(folder / "chk"), NUM_STEPS, waits=True))
    return folder / "chk", run_to_end(Run(str(folder / "whole"), 8, checkpoints=False))


def copied(saved: tuple[Path, Log], folder: Path) -> Path:
    shutil.copytree(saved[0], folder / "chk")
    return folder / "chk"


@pytest.mark.parametrize("seed", sized(range(40), smoke=range(3).__contains__))
def test_damage_anywhere_in_the_newest_is_walked_past_or_changes_nothing(
    seed: int, saved: tuple[Path, Log], tmp_path: Path
) -> None:
    chk_dir, dice = copied(saved, tmp_path), random.Random(seed)
    newest = chk_dir / f"step-{NUM_STEPS:08d}"
    victim = dice.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
    data = bytearray(victim.read_bytes())
    match dice.choice(("flip", "cut", "zero", "gone")):
        case "flip":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        case "cut":
            del data[dice.randrange(len(data)) :]
        case "zero":
            start = dice.randrange(len(data))
            data[start : start + 512] = bytes(len(data[start : start + 512]))
        case "gone":
            victim.unlink()
    if victim.exists():
        victim.write_bytes(data)
    after = run_to_end(Run(str(chk_dir), 8))
    assert after.restored is not None
    step, digest = after.restored
    assert step >= NUM_STEPS - 1
    assert digest == saved[1].boundaries[step]
    assert after.boundaries.items() <= saved[1].boundaries.items()
    assert verify_all(chk_dir)[-1] == 8


def test_what_a_stranger_planted_is_neither_followed_nor_waited_for(
    saved: tuple[Path, Log], tmp_path: Path
) -> None:
    chk_dir, treasure = copied(saved, tmp_path), tmp_path / "treasure"
    treasure.mkdir()
    (treasure / "kept").write_text("mine")
    (chk_dir / "step-00000100").symlink_to(treasure)
    (chk_dir / ".tmp-101-x").symlink_to(treasure)
    os.mkfifo(chk_dir / "step-00000102")
    (chk_dir / "step-00000103").mkdir()
    os.mkfifo(chk_dir / "step-00000103" / "manifest.json")
    (chk_dir / "step-00000104").mkdir()
    (chk_dir / "step-00000104" / "manifest.json").write_bytes(b"[" * 100_000)
    after = run_to_end(Run(str(chk_dir), 8))
    assert after.restored == (NUM_STEPS, saved[1].boundaries[NUM_STEPS])
    assert (treasure / "kept").read_text() == "mine"
    command("ls", chk_dir)
    command("verify", chk_dir)
    with pytest.raises(CheckFreqError):
        checkfreq.load(chk_dir, step=104)


def test_retention_keeps_what_it_was_told_to(tmp_path: Path) -> None:
    run_to_end(Run(str(tmp_path / "chk"), 9, keep_last=2, waits=True))
    assert [one["step"] for one in command("ls", tmp_path / "chk", status=0)] == [8, 9]
    command("pin", tmp_path / "chk", 8)
    run_to_end(Run(str(tmp_path / "chk"), 12, keep_last=2, waits=True))
    assert verify_all(tmp_path / "chk") == [8, 11, 12]
