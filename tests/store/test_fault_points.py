"""The store's fault points, reached in child processes because the script is their environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkfreq import faults
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes

#: What the store passes; ``commit.write`` is its caller's, who writes the payloads.
STORE_POINTS = [
    point
    for point in faults.POINTS
    if point.startswith(("commit.", "prune.")) and point != "commit.write"
]

#: The pruned step has lost its name.
AFTER_THE_PRUNE = ("prune.sync", "prune.remove")

CHILD = """
import sys
from pathlib import Path
from checkfreq.store.store import CheckpointStore
from checkfreq.testing import commit_bytes

store = CheckpointStore(Path(sys.argv[1]))
store.open()
commit_bytes(store, 2, {"model.safetensors": b"state"}, supersede_after=1)
store.prune([1])
"""

IMPORTS = """
import sys
import checkfreq.store.store
assert not {"torch", "numpy"} & set(sys.modules)
"""


def run(script: str, *args: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A directory with steps 1 and 3."""
    store = CheckpointStore(tmp_path / "chk")
    store.open()
    for step in (1, 3):
        commit_bytes(store, step, {"model.safetensors": b"state"})
    return store


def test_a_commit_and_a_prune_pass_every_point_in_order(
    store: CheckpointStore, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    child = run(CHILD, store.root, CHECKFREQ_FAULT_LOG=str(log))
    assert child.returncode == 0, child.stderr
    assert log.read_text().split() == STORE_POINTS
    assert store.steps() == [2]


@pytest.mark.parametrize("point", STORE_POINTS)
def test_a_full_disk_at_any_point_leaves_the_old_set_or_one_more(
    store: CheckpointStore, point: str
) -> None:
    child = run(CHILD, store.root, CHECKFREQ_FAULT=f"{point}:raise-ENOSPC")
    late = STORE_POINTS.index(point) >= STORE_POINTS.index("commit.sync_parent")
    is_pruned = point in ("commit.pointer", *AFTER_THE_PRUNE)
    steps = [2] if is_pruned else [1, 2] if late else [1, 3]
    assert (child.returncode == 0) is (point == "commit.pointer")
    assert store.steps() == steps
    assert [store.verify(step).step for step in steps] == steps
    if point in AFTER_THE_PRUNE:
        store.open()  # removes what the prune has renamed
    assert not [name for name in os.listdir(store.root) if name.startswith(".")]


@pytest.mark.parametrize("point", STORE_POINTS)
def test_a_kill_at_any_point_leaves_only_whole_checkpoints(
    store: CheckpointStore, point: str
) -> None:
    child = run(CHILD, store.root, CHECKFREQ_FAULT=f"{point}:kill-self")
    assert child.returncode == -9
    steps = store.steps()
    before = STORE_POINTS.index(point) <= STORE_POINTS.index("commit.supersede")
    if point in AFTER_THE_PRUNE:
        assert steps == [2]
    else:
        assert steps == ([1, 3] if before else [1] if point == "commit.rename" else [1, 2])
    assert [store.verify(step).step for step in steps] == steps
    store.open()
    assert not [name for name in os.listdir(store.root) if name.startswith(".")]


def test_the_store_imports_neither_torch_nor_numpy() -> None:
    child = run(IMPORTS)
    assert child.returncode == 0, child.stderr
