"""What ranks of another number read of shards: each byte once in all, and no more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.restore.apply import prepare
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.reading import StreamReader
from checkfreq.store.store import CheckpointStore
from checkfreq.types import PAGE_BYTES
from tests.acceptance.ranks import Life, Rank, run_well
from tests.ranks.tiny import config, local

pytestmark = [pytest.mark.dist]

SHAPE = (128, 2048)
NUM_BYTES = 4 * SHAPE[0] * SHAPE[1]


def table(rank: Rank, whole: Tensor) -> dict[str, Tensor]:
    """What is tracked: a tensor whose rows are spread over the ranks."""
    mesh = init_device_mesh("cpu", (rank.world,))
    return {"rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)}


def save(rank: Rank) -> None:
    """Make a checkpoint of a table."""
    rows = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    chk = CFCheckpoint(rng=False, table=table(rank, rows))
    with CFManager(
        rank.chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0, config=config(rank)
    ) as manager:
        manager.save(wait=True)


def load(rank: Rank) -> None:
    """Load it, and say how many bytes were read, and whether it arrived."""
    tracked = table(rank, torch.zeros(SHAPE))
    store = CheckpointStore(rank.chk_dir)
    (step,) = store.steps()
    manifest = store.manifest(step)
    arrived: list[int] = []
    reader = StreamReader(store, step, num_threads=2, on_read=arrived.append)
    found = FoundCheckpoint(manifest, manifest.files, reader)
    chk = CFCheckpoint(rng=False, table=tracked)
    plan = prepare(chk, found, path=str(rank.chk_dir), rank=rank.rank, world=rank.world)
    plan.fetch()
    plan.load()
    plan.stream()
    rows = local(tracked["rows"])
    first = rank.rank * rows.numel()
    expected = torch.arange(first, first + rows.numel(), dtype=torch.float32)
    rank.send("read", sum(arrived), torch.equal(rows.flatten(), expected))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a run that saved at a world."""

    @cache
    def make(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"saved-{world}")
        run_well(Life(save, folder, world))
        return folder

    return make


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_restore_at_another_world_reads_each_byte_of_a_shard_once_in_all(
    before: int, after: int, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    shutil.copytree(saved(before) / "chk", tmp_path / "chk")
    heard = [one.last("read") for one in run_well(Life(load, tmp_path, after))]
    assert all(is_right for _, is_right in heard)
    headers = PAGE_BYTES * max(before, after)  # a rank verifies those of the files that it reads
    assert sum(num_bytes for num_bytes, _ in heard) == NUM_BYTES + headers
