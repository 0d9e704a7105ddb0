"""No measurement may end a training run: noise, clocks that jump."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from checkfreq.policy.frequency import FrequencyPolicy
from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import PROFILE_ITERATIONS, Iteration, Measured, RateTuner, Verdict
from checkfreq.types import Objective
from tests.policy.runs import CACHED

#: What a clock may say: small steps, none, back, far away, and what is no number.
WILD = st.one_of(
    st.floats(-1e-6, 0.0),
    st.sampled_from([-1.1e-6, 5e-324, math.inf, -math.inf, math.nan, 1e300, -1e300]),
    st.floats(),
)
SMALL = st.floats(0.0, 1e-5)
NOISE = st.integers(0, 19).flatmap(lambda one_in_twenty: SMALL if one_in_twenty else WILD)
POLICIES = st.builds(
    FrequencyPolicy,
    max_overhead=st.sampled_from([1e-6, 0.035, 0.99]),
    mtbf_s=st.sampled_from([None, 1e-6, 3600.0]),
    objective=st.sampled_from(Objective),
    num_slots=st.sampled_from([1, 2]),
)


@settings(max_examples=50)
@given(
    policy=POLICIES,
    dynamic=st.booleans(),
    has_cache=st.booleans(),
    noise=st.lists(st.tuples(*[NOISE] * 7, st.booleans()), min_size=1, max_size=80),
)
def test_no_measured_time_raises_an_error(
    policy: FrequencyPolicy,
    dynamic: bool,
    has_cache: bool,
    noise: list[tuple[Any, ...]],
) -> None:
    tuner = RateTuner(policy, dynamic=dynamic, cached=CACHED if has_cache else None)
    now_s = 0.0
    for step in range(4 * PROFILE_ITERATIONS + len(noise)):
        one, two, three, four, five, six, seven, ends = noise[step % len(noise)]
        start_s, now_s = now_s, now_s + one if abs(one) < 1.0 else one
        tuner.iteration(Iteration(start_s, now_s, two, three, waited_s=four / 8, met_s=five / 8))
        tuner.met(five)
        tuner.set_cost_floor({"cost_s": 0.5, "cost_upper_s": 0.75} if ends else {})
        if tuner.due(step=step, now_s=now_s) is Verdict.TAKE:
            tuner.started(str(step), step=step, start_s=now_s, is_periodic=True)
        if ends:
            measured = Measured(copy_s=two, persist_s=six, durable_s=seven, state_bytes=8)
            tuner.ended(str(step), end_s=six if six > 1e-5 else now_s, measured=measured)
        tuner.next_due_step(step)
        tuner.steps_to_meeting(due_steps=1, iteration_s=one, every_s=1.0, since_last=step)
        require_sense(tuner)


def require_sense(tuner: RateTuner) -> None:
    assert math.isfinite(tuner.overhead_s)
    assert 0.0 <= tuner.productive_s < math.inf
    assert math.isfinite(tuner.balance_s)
    if tuner.plan is not None:
        assert tuner.plan.interval_steps >= 1
        assert tuner.plan.predicted_overhead >= 0.0
    profile = tuner.profile()
    assert profile is None or Profile.from_dict(profile.to_dict()) == profile


def test_a_checkpoint_with_a_bad_start_time_is_over_when_it_ends() -> None:
    tuner = RateTuner(FrequencyPolicy(max_overhead=0.5))
    tuner.started("a", step=0, start_s=math.nan, is_periodic=True)
    tuner.ended("a", end_s=0.5, measured=None)
    for at in range(30):
        tuner.iteration(Iteration(float(at), at + 1.0))
    assert tuner.due(step=40, now_s=30.0) is Verdict.TAKE
    assert tuner.num_bad_samples == 1
