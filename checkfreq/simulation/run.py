"""The entry point: ``simulate``.

If nothing varies, every start of the same decider goes the same way. It is then stepped through
once and replayed up to each failure (replay.py), which takes microseconds per failure. Stepping
takes 3 to 15 us per iteration (measured 2026-11), and a thousand failures of 8 GPUs at published
rates are 1e10 iterations of a second: days.
"""

from __future__ import annotations

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import is_amount
from checkfreq.simulation.costs import Noise, Rhythm, Trace
from checkfreq.simulation.deciders import NewDecider
from checkfreq.simulation.engine import FailureClock, Run
from checkfreq.simulation.failures import Failures, Never
from checkfreq.simulation.outcome import Outcome
from checkfreq.simulation.replay import Overlapping, replay


def simulate(
    trace: Trace,
    new_decider: NewDecider,
    *,
    wall_s: float,
    failures: Failures | None = None,
    restart_s: float = 0.0,
    noise: Noise | None = None,
    rhythm: Rhythm | None = None,
    seed: int = 0,
    max_overhead: float = 0.035,
    keep_profile: bool = False,
) -> Outcome:
    """A run of ``wall_s`` simulated seconds; the same arguments give the same outcome.

    ``new_decider`` makes what decides: ``lambda cached: RateTuner(policy, cached=cached)``, or
    ``lambda _: FixedInterval(50)``. With ``keep_profile`` it is given, after a failure, the
    profile measured before it. ``max_overhead`` only defines ``Outcome.excess_s``.
    Raises ConfigError for times that are negative or not finite, for a ``wall_s`` of 0, and for a
    run that would take minutes to simulate.
    """
    for name, value in (("wall_s", wall_s), ("restart_s", restart_s)):
        if not is_amount(value):
            raise ConfigError(f"{name}: expected finite seconds >= 0, got {value!r}")
    if not wall_s > 0:
        raise ConfigError(f"wall_s: expected more than 0 s, got {wall_s}")
    failures, noise, rhythm = failures or Never(), noise or Noise(), rhythm or Rhythm()

    def new_run(failures: Failures) -> Run:
        return Run(
            trace,
            new_decider,
            failures=failures,
            restart_s=restart_s,
            noise=noise,
            rhythm=rhythm,
            seed=seed,
            max_overhead=max_overhead,
            keep_profile=keep_profile,
        )

    varies = noise or rhythm or not trace.is_steady
    if not varies and not keep_profile and not failures.notice_s:
        clock = FailureClock(failures, restart_s=restart_s, seed=seed)
        try:
            return replay(
                new_run(Never()), clock, trace.at(0.0), wall_s=wall_s, max_overhead=max_overhead
            )
        except Overlapping:
            pass  # replay cannot tell how checkpoints that overlap slow one another down
    run = new_run(failures)
    run.go_on(wall_s)
    return run.outcome()
