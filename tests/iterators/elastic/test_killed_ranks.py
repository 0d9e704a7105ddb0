"""Real ranks, killed at random instants and restarted at another layout, learn the same."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from iterators import Ledger, Position
from iterators.ledger import ledger_of_range
from tests.iterators.elastic.killing import run_killed
from tests.iterators.elastic.program import Data, Model, undisturbed

pytestmark = [pytest.mark.crash, pytest.mark.dist]

KILLS = 4
SIZES = (197, 240, 256)


@cache
def expected(data: Data) -> Model:
    return undisturbed(data)


@pytest.mark.parametrize("seed", range(20))
def test_killed_ranks_at_changing_layouts_learn_what_one_process_learns(
    seed: int, tmp_path: Path
) -> None:
    data = Data(n=SIZES[seed % len(SIZES)], epochs=3, seed=5)
    saved, struck = run_killed(data, tmp_path, random.Random(seed), kills=KILLS)
    position, model = Position.from_dict(saved["position"]), saved["model"]
    assert struck >= 2
    assert (position.epoch, position.position) == (data.epochs, 0)
    assert model["counts"] == [[1] * data.n] * data.epochs
    assert [Ledger.from_dict(one) for one in model["ledgers"]] == [ledger_of_range(data.n)] * 3
    assert model == expected(data).state()
