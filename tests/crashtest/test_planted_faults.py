"""Each of twelve planted faults is found and named; the clean scripts pass."""

from __future__ import annotations

import pytest

from checkfreq.crashtest.verdict import Outcome
from tests.crashtest.conftest import CrashTest

pytestmark = [pytest.mark.more, pytest.mark.crash]

#: Script, fault, and the cause that must be named first.
PLANTED = (
    ("train", "forgotten-scheduler", "forgotten-scheduler"),
    ("train", "torch-seed-in-dataset", "seed-in-dataset"),
    ("train", "stateful-augmentation", "stateful-augmentation"),
    ("train", "lr-from-batch-index", "lr-from-batch-index"),
    ("train", "persistent-validation-loader", "loader-draws"),
    ("train", "accumulation-by-enumerate", "accumulation-by-enumerate"),
    ("train", "lost-scaler", "lost-scaler"),
    ("train", "missing-ema", "missing-ema"),
    ("plain", "position-by-batch-count", "position"),
    ("plain", "torn-copy", "torn-copy"),
    ("plain", "reused-seed", "reused-seed"),
    ("plain", "non-durable-save", "non-durable-save"),
)


@pytest.mark.parametrize(("script", "fault", "cause"), PLANTED)
def test_a_planted_fault_is_found_and_named(
    crashtest: CrashTest, script: str, fault: str, cause: str
) -> None:
    verdict = crashtest(script, fault)
    assert verdict.outcome in (Outcome.DIFFERS, Outcome.FAILED)
    assert verdict.causes[0].name == cause


@pytest.mark.parametrize("script", ["train", "plain"])
def test_a_script_without_a_fault_resumes_exactly(crashtest: CrashTest, script: str) -> None:
    verdict = crashtest(script, kills=3)
    assert verdict.outcome is Outcome.EXACT
    assert len(verdict.deaths) == 3
    assert any(death.restored for death in verdict.deaths)
