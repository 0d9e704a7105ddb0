"""What uploads add to iterations, and what the tuner makes of it."""

from __future__ import annotations

from checkfreq.policy.charges import Baseline
from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.tuner import Iteration, RateTuner, Verdict
from checkfreq.policy.uploads import Uploads
from tests.policy.runs import CACHED

BASELINE = Baseline(iteration_s=1.0, raw_s=1.0, limit_s=4.0)


def iteration(start_s: float, duration_s: float, stall_s: float = 0.0) -> Iteration:
    return Iteration(start_s, start_s + duration_s, stall_s)


def test_what_was_paid_is_given_back_where_it_was_noise() -> None:
    uploads = Uploads()
    uploads.note(0.0, None)
    assert not uploads.add(iteration(-2.0, 2.0), BASELINE)  # over when it began
    uploads.add(iteration(0.0, 1.2), BASELINE)
    paid_s = uploads.settle()
    uploads.add(iteration(1.2, 0.7), BASELINE)
    assert paid_s > 0.19
    assert uploads.settle() == -paid_s


def played(slowdown: float) -> tuple[RateTuner, float]:
    """A run with a cached plan: 20 clean iterations, then 60 during an upload."""
    tuner = RateTuner(FrequencyPolicy(max_overhead=0.05), cached=CACHED)
    tuner.continue_from(1)
    now_s, usual_s = 0.0, CACHED.iteration_s
    for _ in range(20):
        tuner.iteration(iteration(now_s, usual_s))
        now_s += usual_s
    tuner.uploading(now_s, None)
    for _ in range(60):
        tuner.iteration(iteration(now_s, usual_s * slowdown))
        now_s += usual_s * slowdown
    tuner.uploading(now_s - 60 * usual_s * slowdown, now_s)
    return tuner, now_s


def test_an_upload_that_slows_training_down_is_paid_from_the_budget() -> None:
    tuner, now_s = played(1.2)
    assert tuner.iteration_s == CACHED.iteration_s
    assert abs(tuner.overhead_s - 60 * 0.2 * CACHED.iteration_s) < 1e-6
    assert tuner.balance_s < 0
    tuner.started("first", step=100, start_s=now_s, is_periodic=True)
    tuner.ended("first", end_s=now_s, measured=None)
    assert tuner.due(step=1000, now_s=now_s) is Verdict.NO_BUDGET


def test_a_run_that_begins_during_an_upload_learns_its_iteration_time() -> None:
    tuner = RateTuner(FrequencyPolicy(max_overhead=0.05))
    tuner.uploading(0.0, None)
    for index in range(30):
        tuner.iteration(iteration(float(index), 1.0))
    assert tuner.iteration_s == 1.0


def test_a_pause_for_clean_iterations_ends_during_an_upload() -> None:
    tuner, now_s = played(1.0)
    tuner.uploading(now_s, None)
    tuner._refresh._num_left = 6
    assert tuner.due(step=1000, now_s=now_s) is Verdict.MEASURING
    for _ in range(6):
        tuner.iteration(iteration(now_s, CACHED.iteration_s))
        now_s += CACHED.iteration_s
    assert tuner.due(step=1000, now_s=now_s) is Verdict.TAKE
