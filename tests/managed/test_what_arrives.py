"""What an agent that copies files may bring back, one thing at a time."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from tests.acceptance.processes import verify_all
from tests.acceptance.programs import Training
from tests.managed.agent import bring_back, copy_whole

STEPS = 3


def manager_of(training: Training, chk_dir: Path, *, copied: bool = True) -> CFManager:
    return CFManager(
        chk_dir,
        CFCheckpoint(**training.tracked()),
        mode=CFMode.MANUAL,
        chk_freq=1,
        retention=KeepLast(STEPS),
        config=CFConfig(nice=0, takeover_s=30.0, agent_copies_within_s=0.0 if copied else None),
    )


def train(training: Training, manager: CFManager, steps: int) -> None:
    for _ in range(steps):
        training.update(manager)
        manager.step()


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The objects of a run with checkpoints of steps 1 to 3."""
    root = tmp_path_factory.mktemp("left")
    training = Training()
    with manager_of(training, root / "chk") as manager:
        manager.restore()
        train(training, manager, STEPS)
    return copy_whole(root / "chk", root / "objects")


@pytest.fixture
def chk_dir(left: Path, tmp_path: Path) -> Path:
    """The directory of a new machine."""
    bring_back(left, tmp_path / "chk", seed=0)
    return tmp_path / "chk"


def restored_step(chk_dir: Path, *, copied: bool = True) -> int:
    with manager_of(Training(), chk_dir, copied=copied) as manager:
        manager.restore()
        return manager.global_step


@pytest.mark.parametrize(
    ("name", "length"), [("manifest.json", None), ("manifest.json", 100), ("model.safetensors", 0)]
)
def test_a_checkpoint_that_lacks_a_file_or_its_end_is_walked_past_and_removed(
    name: str, length: int | None, chk_dir: Path
) -> None:
    cut(chk_dir / "step-00000003" / name, length)
    assert (chk_dir / "latest").read_text().strip() == "step-00000003"
    assert restored_step(chk_dir) == 2
    assert not (chk_dir / "step-00000003").exists()
    assert not (chk_dir / "quarantine").exists()


def test_if_nothing_arrived_whole_the_run_starts_anew_and_says_so(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, STEPS + 1):
        (chk_dir / f"step-{step:08d}" / "model.safetensors").unlink()
    training = Training()
    with caplog.at_level(logging.WARNING), manager_of(training, chk_dir) as manager:
        assert not manager.restore()
        train(training, manager, 1)
    assert verify_all(chk_dir) == [1]
    assert "no checkpoint has arrived whole: training starts anew" in caplog.text


def test_unfinished_doomed_and_older_checkpoints_in_part_that_arrive_are_removed(
    chk_dir: Path,
) -> None:
    for step, name in ((1, "manifest.json"), (2, "model.safetensors")):
        (chk_dir / f"step-{step:08d}" / name).unlink()
    for name in (".tmp-4-abcdef", ".trash-1"):
        shutil.copytree(chk_dir / "step-00000003", chk_dir / name)
    assert restored_step(chk_dir) == 3
    assert verify_all(chk_dir) == [3]
    assert not [path for path in chk_dir.iterdir() if path.name.startswith((".tmp", ".trash"))]


def test_markers_of_the_agent_beside_every_file_are_of_no_account(chk_dir: Path) -> None:
    for path in [path for path in chk_dir.rglob("*") if path.is_file()]:
        path.with_name(f"{path.name}.sagemaker-uploaded").touch()
        path.with_name(f".{path.name}.part").write_bytes(b"x")
    training = Training()
    with manager_of(training, chk_dir) as manager:
        assert manager.restore()
        train(training, manager, STEPS)
    assert verify_all(chk_dir) == [4, 5, 6]


@pytest.mark.parametrize("content", [b"", b'{"trainer_pid": 12', b"\xff" * 64], ids=len)
def test_small_files_that_arrived_in_part_change_nothing(content: bytes, chk_dir: Path) -> None:
    for name in (".lock", "latest", "marks.jsonl", "events.jsonl", "profile.json", "run.json"):
        (chk_dir / name).write_bytes(content)
    training = Training()
    with manager_of(training, chk_dir) as manager:
        assert manager.restore()
        assert manager.global_step == STEPS
        train(training, manager, 1)
    assert verify_all(chk_dir) == [2, 3, 4]


def cut(path: Path, length: int | None) -> None:
    """Keep so many bytes; None: the file never arrived."""
    data = path.read_bytes()
    path.unlink()
    if length is not None:
        path.write_bytes(data[:length])
