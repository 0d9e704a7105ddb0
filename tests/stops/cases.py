"""What tests that stop runs at random instants share: one file is for one rank, one for two."""

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

#: Instants of each case, in `make test` and in `make test-more`.
SOME, MANY = 2, 17


@cache
def seed() -> int:
    """Drawn once; set the variable to repeat a failure."""
    return int(os.environ.get("CHECKFREQ_STOP_SEED", random.SystemRandom().getrandbits(32)))


def cases(world: int) -> list[object]:
    """Every way to signal so many ranks, with and without loader workers."""
    kinds = [Case(world, *one) for one in product((0, 2), ("process", "group", "everything"))]
    return [_marked(case, number) for number in (SOME, MANY) for case in kinds]


def _marked(case: Case, num_instants: int) -> object:
    marks = [pytest.mark.more] if num_instants == MANY else []
    return pytest.param(case, num_instants, marks=marks, id=f"{case}, {num_instants} instants")


def stop_at_random_instants(case: Case, num_instants: int, zygote: Zygote, folder: Path) -> None:
    """Fail unless every stop ends as documented, and every run as one that is never stopped."""
    print(f"CHECKFREQ_STOP_SEED={seed()}")
    whole = run_whole(zygote, folder / "whole", case)
    instants = stop_over_and_over(
        zygote, folder, case, whole, num_instants=num_instants, seed=seed()
    )
    assert len(instants) == num_instants
