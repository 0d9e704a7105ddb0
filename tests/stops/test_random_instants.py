"""SIGTERM at random instants: the run ends, nothing is lost, and the status says what happened."""

from __future__ import annotations

import os
import random
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.stops.aiming import Case
from tests.stops.stopping import run_whole, stop_over_and_over
from tests.stops.zygote import Zygote

pytestmark = pytest.mark.crash

CASES = [Case(*one) for one in product((1, 2), (0, 2), ("process", "group", "everything"))]

#: Instants of each case, in `make test` and in `make test-more`.
SOME, MANY = 4, 17


@cache
def seed() -> int:
    """Drawn once; set the variable to repeat a failure."""
    return int(os.environ.get("CHECKFREQ_STOP_SEED", random.SystemRandom().getrandbits(32)))


def marked(case: Case, num_instants: int) -> object:
    """``dist`` with two ranks."""
    marks = [pytest.mark.dist] if case.world > 1 else []
    if num_instants == MANY:
        marks.append(pytest.mark.more)
    return pytest.param(case, num_instants, marks=marks, id=f"{case}, {num_instants} instants")


@pytest.mark.parametrize(
    ("case", "num_instants"),
    [marked(case, number) for number in (SOME, MANY) for case in CASES],
)
def test_a_run_stopped_at_random_instants_ends_with_75_and_resumes_to_the_same_bits(
    case: Case, num_instants: int, zygote: Zygote, tmp_path: Path
) -> None:
    print(f"CHECKFREQ_STOP_SEED={seed()}")
    whole = run_whole(zygote, tmp_path / "whole", case)
    instants = stop_over_and_over(
        zygote, tmp_path, case, whole, num_instants=num_instants, seed=seed()
    )
    assert len(instants) == num_instants
