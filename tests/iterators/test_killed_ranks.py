"""Real ranks, killed and gone on with at another number of ranks, serve each sample once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.rank_killing import events
from tests.acceptance.rank_training import EPOCHS, NUM_SAMPLES, train
from tests.acceptance.ranks import Heard, Life, Ranks, run_well

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.more]


def served(heard: list[Heard], *, before: int | None = None) -> list[tuple[int, int]]:
    """(epoch, sample) of all ranks, of the steps before the one given."""
    return [
        (key[0], sample)
        for one in heard
        for kind, key, step, bits in events(one)
        if kind == "batch" and (before is None or step < before)
        for sample in bits[0]
    ]


@pytest.mark.parametrize(("world", "other"), [(2, 3), (3, 1)])
def test_killed_ranks_at_changing_layouts_serve_every_sample_once(
    world: int, other: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"job": "fsdp", "chk_freq": 1, "wait_every": 2}
    with Ranks(Life(train, tmp_path, world, settings=settings)) as ranks:
        ranks.read_until(lambda: max([0, *ranks.heard[0].all("durable")]) >= 5)
        ranks.kill()
        killed = ranks.finish()
    last = run_well(Life(train, tmp_path, other, 1, 1, {**settings, "batch": 3}))
    (start,) = {one.last("restored") for one in last}
    assert start >= 5
    found = served(killed, before=start) + served(last)
    assert sorted(found) == [(epoch, one) for epoch in range(EPOCHS) for one in range(NUM_SAMPLES)]
