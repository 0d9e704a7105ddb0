"""A Lightning run that was killed ends with the same bits as one that was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.killing import run_killed
from tests.integrations.programs import train_lightning
from tests.patience import slowness

pytestmark = [
    pytest.mark.more,
    pytest.mark.crash,
    pytest.mark.filterwarnings("ignore"),  # Lightning's, at its import
]

NUM_SAMPLES, NUM_EPOCHS = 28, 3
#: By case, and whether each epoch has all samples.
CASES = {
    "automatic": True,  # accumulation, validation inside the epoch, plateau, ModelCheckpoint
    "manual": True,  # two optimizers, loader workers, ModelCheckpoint by steps
    "averaged": False,  # a loss scale, averaged weights, an epoch cut short, early stopping
    "stream": False,  # an iterable dataset without a length, up to max_steps
    "ranks": True,  # two under DDP
}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_with_the_bits_of_one_never_killed(case: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    world = 2 if case == "ranks" else 1
    # A successor may wait so long for parts that nobody will write any more.
    config = {"rank_timeout_s": 4.0 * slowness()} if world > 1 else {}
    whole = run_killed(train_lightning, tmp_path, world=world, seed=1, case=case, config=config)
    batches = [data for rank in whole for kind, _, data in rank if kind == "batch"]
    for epoch in range(NUM_EPOCHS) if CASES[case] else ():
        used = sorted(i for (at, _), (ids, *_) in batches if at == epoch for i in ids)
        assert used == list(range(NUM_SAMPLES))
