"""SIGTERM at random instants of a run of two ranks, to one of them or to all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stops.aiming import Case
from tests.stops.cases import cases, stop_at_random_instants
from tests.stops.zygote import Zygote

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.more]


@pytest.mark.parametrize(("case", "num_instants"), cases(2))
def test_ranks_stopped_at_random_instants_end_with_75_and_resume_to_the_same_bits(
    case: Case, num_instants: int, zygote: Zygote, tmp_path: Path
) -> None:
    stop_at_random_instants(case, num_instants, zygote, tmp_path)
