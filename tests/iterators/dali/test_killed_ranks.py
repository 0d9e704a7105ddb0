"""Real ranks that read with DALI, killed and restarted at another layout, see the same pixels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.iterators.elastic.killing import require_killed_learns_the_same
from tests.iterators.elastic.program import Data

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.more]


@pytest.mark.parametrize("seed", range(4))
def test_killed_ranks_at_changing_layouts_see_the_same_pixels(
    seed: int, images: Path, tmp_path: Path
) -> None:
    data = Data(n=40, epochs=6, seed=5, images=str(images))
    assert require_killed_learns_the_same(data, tmp_path, seed=seed, kills=2) >= 1
