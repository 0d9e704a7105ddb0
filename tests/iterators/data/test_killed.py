"""Runs over loaders of other libraries, killed in mid-epoch: same bits, each sample once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.killing import run_killed
from tests.iterators.data.program import EPOCHS, train
from tests.iterators.data.sources import NUM_SAMPLES, require_installed
from tests.patience import slowness

pytestmark = [pytest.mark.more, pytest.mark.crash]

two_ranks = pytest.mark.dist

#: Kind, loader workers, ranks. Two ranks without workers: old Pythons hang when such a rank forks.
RUNS = [
    ("datasets map-style", 2, 1),
    ("datasets streaming", 2, 1),
    pytest.param("datasets streaming, shuffled", 0, 2, marks=two_ranks),
    ("webdataset shards", 2, 1),
    ("webdataset pipeline", 2, 1),
    ("torchdata nodes", 2, 1),
    pytest.param("torchdata nodes", 0, 2, marks=two_ranks),
    ("mosaicml", 2, 1),
]


@pytest.mark.parametrize(("kind", "workers", "world"), RUNS)
def test_a_killed_run_ends_with_the_bits_of_one_never_killed(
    kind: str, workers: int, world: int, tmp_path: Path
) -> None:
    require_installed(kind)
    config = {"rank_timeout_s": 4.0 * slowness()} if world > 1 else {}
    settings = {"kind": kind, "workers": workers, "config": config}
    whole = run_killed(train, tmp_path, world=world, seed=30, **settings)
    batches = [data for rank in whole for name, _, data in rank if name == "batch"]
    for epoch in range(EPOCHS):
        used = sorted(i for one, ids, *_ in batches if one == epoch for i in ids)
        assert used == list(range(NUM_SAMPLES))
    if kind == "datasets streaming":
        return  # in the order of the shards, which may be the same in two epochs
    orders = [[i for one, ids, *_ in batches if one == epoch for i in ids] for epoch in range(2)]
    assert orders[0] != orders[1], "both epochs have the same order"
