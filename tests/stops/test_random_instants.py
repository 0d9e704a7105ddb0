"""SIGTERM at random instants: the run ends, nothing is lost, and the status says what happened."""

from __future__ import annotations

import os
import random
from itertools import product
from pathlib import Path

import pytest

from tests.stops.aiming import Case
from tests.stops.stopping import run_whole, stop_over_and_over

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.more]

#: Every way to signal one rank or two, with and without loader workers.
CASES = [Case(*one) for one in product((1, 2), (0, 2), ("process", "group", "everything"))]
NUM_INSTANTS = 12  # of each case
#: Set the variable to repeat a failure.
SEED = int(os.environ.get("CHECKFREQ_STOP_SEED", random.SystemRandom().getrandbits(32)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_stopped_at_random_instants_ends_with_75_and_resumes_to_the_same_bits(
    case: Case, tmp_path: Path
) -> None:
    print(f"CHECKFREQ_STOP_SEED={SEED}")
    whole = run_whole(tmp_path / "whole", case)
    instants = stop_over_and_over(tmp_path, case, whole, num_instants=NUM_INSTANTS, seed=SEED)
    assert len(instants) == NUM_INSTANTS
