"""Each of the planted faults is found and named; the clean scripts pass."""

from __future__ import annotations

import pytest

from checkfreq.crashtest.verdict import Outcome
from tests.crashtest.conftest import CrashTest

pytestmark = [pytest.mark.more, pytest.mark.crash]

#: Script, fault, and the cause that must be named first, and what it must name.
PLANTED = (
    ("train", "forgotten-scheduler", "untracked-object", "`scheduler` (StepLR)"),
    ("train", "torch-seed-in-dataset", "seed-in-dataset", "torch.manual_seed(7)"),
    ("train", "stateful-augmentation", "stateful-augmentation", "dataset.num_served` ("),
    ("train", "local-counter", "untracked-variable", "`count` ("),
    ("train", "persistent-validation-loader", "loader-draws", "train.py"),
    ("train", "range", "longer-run", "60 steps"),
    ("loop", "environment", "untracked-variable", "`observed`, `environment.state`."),
    ("plain", "position-by-batch-count", "position", "off by"),
    ("plain", "torn-copy", "torn-copy", "holds model.1."),
    ("plain", "reused-seed", "reused-seed", "an earlier epoch"),
    ("plain", "training-flag", "module-flag", "`model.1.training` (True instead of False)"),
)


@pytest.mark.parametrize(("script", "fault", "cause", "named"), PLANTED)
def test_a_planted_fault_is_found_and_named(
    crashtest: CrashTest, script: str, fault: str, cause: str, named: str
) -> None:
    verdict = crashtest(script, fault)
    assert verdict.outcome is Outcome.DIFFERS
    assert verdict.causes[0].name == cause
    assert named in verdict.causes[0].text


def test_a_script_that_writes_in_place_does_not_resume(crashtest: CrashTest) -> None:
    verdict = crashtest("plain", "non-durable-save")
    assert verdict.outcome in (Outcome.DIFFERS, Outcome.FAILED)
    assert verdict.causes[0].name == "non-durable-save"


def test_code_after_the_loop_that_needs_its_variables_fails_after_the_last_kill(
    crashtest: CrashTest,
) -> None:
    verdict = crashtest("train", "after-loop", kills=1)
    assert verdict.outcome is Outcome.FAILED
    assert verdict.deaths[-1].step == verdict.num_steps
    assert verdict.causes[0].name == "fails-when-done"
    assert "UnboundLocalError" in verdict.causes[0].text


def test_a_clock_is_named_where_two_uninterrupted_runs_differ(crashtest: CrashTest) -> None:
    verdict = crashtest("train", "clock")
    assert verdict.outcome is Outcome.NOT_DETERMINISTIC
    assert [cause.name for cause in verdict.causes] == ["clock"]
    assert "Setting optimizer.param_groups.0.lr differs" in verdict.causes[0].text
    assert "`elapsed_s` (" in verdict.causes[0].text


@pytest.mark.parametrize(
    ("script", "variant"),
    [("train", ""), ("train", "peek"), ("loop", ""), ("plain", ""), ("plain", "no-loader")],
)
def test_a_script_without_a_fault_resumes_exactly(
    crashtest: CrashTest, script: str, variant: str
) -> None:
    verdict = crashtest(script, variant, kills=3)
    assert verdict.outcome is Outcome.EXACT
    assert len(verdict.deaths) == 4
    assert any(death.restored for death in verdict.deaths)
