"""How often the runs of a story failed. Pure.

A failure is the end of a run that nobody asked for: killed without a stop signal, or ended by an
exception other than Ctrl-C. A killed run counts up to its death if its worker recorded that, else
up to its last event. The latest run may go on.
"""

from __future__ import annotations

from checkfreq.policy.failure_rate import LEAST_RUN_S, FailureRate
from checkfreq.story.model import Run, Story

#: Exceptions by which people end a run.
_ASKED = frozenset(("KeyboardInterrupt",))


def failure_rate(story: Story) -> FailureRate:
    """What the events show, or what the latest run knew of earlier ones if that was more.

    Events go back as far as ``CFConfig.max_events_bytes`` lets them; ``profile.json``, from which a
    run knows, goes back to the first.
    """
    running_s, failures = 0.0, 0
    for run in story.runs:
        lasted_s = run.last_s - run.began_s
        if lasted_s >= LEAST_RUN_S:
            running_s += lasted_s
            failures += has_failed(run, is_latest=run is story.runs[-1])
    shown = FailureRate(failures, running_s)
    known = [run.seen for run in story.runs if run.seen is not None]
    return known[-1] if known and known[-1].more_than(shown) else shown


def has_failed(run: Run, *, is_latest: bool) -> bool:
    """Whether a run ended and nobody had asked for it."""
    if run.counts["stop"] or run.ended_by in _ASKED:
        return False
    return run.how in ("failed", "killed") or not (run.how or is_latest)
