"""SIGTERM at random instants: the run ends, nothing is lost, and the status says what happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stops.aiming import Case
from tests.stops.cases import cases, stop_at_random_instants
from tests.stops.zygote import Zygote

pytestmark = [pytest.mark.crash, pytest.mark.more]


@pytest.mark.parametrize(("case", "num_instants"), cases(1))
def test_a_run_stopped_at_random_instants_ends_with_75_and_resumes_to_the_same_bits(
    case: Case, num_instants: int, zygote: Zygote, tmp_path: Path
) -> None:
    stop_at_random_instants(case, num_instants, zygote, tmp_path)
