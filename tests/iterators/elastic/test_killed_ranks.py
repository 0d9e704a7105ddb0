"""Real ranks, killed at random instants and restarted at another layout, learn the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.iterators.elastic.killing import require_killed_learns_the_same
from tests.iterators.elastic.program import Data

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.more]

#: A prime; one more than most global batches divide, so ranks idle in the tail; a power of two.
SIZES = (197, 241, 256)


@pytest.mark.parametrize("seed", range(20))
def test_killed_ranks_at_changing_layouts_learn_what_one_process_learns(
    seed: int, tmp_path: Path
) -> None:
    data = Data(n=SIZES[seed % len(SIZES)], epochs=3, seed=5)
    assert require_killed_learns_the_same(data, tmp_path, seed=seed, kills=2) >= 1
