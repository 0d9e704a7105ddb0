"""The figures as rows of a name and a text, for a terminal and for a page. Pure."""

from __future__ import annotations

import time

from checkfreq.errors import printable
from checkfreq.story.facts import ABOVE, amount, done_again, number, percent, rate, span
from checkfreq.story.figures import Figures, State
from checkfreq.story.model import Loss

#: What a row is about: nothing special, good, look at it, bad.
PLAIN, GOOD, WARN, BAD = "plain", "good", "warn", "bad"

Row = tuple[str, str, str]


def rows(now: Figures) -> list[Row]:
    """Name, text and kind of each row, in the order in which one looks at them."""
    found = [
        ("run", _run(now), GOOD if now.state in _WELL else BAD),
        ("iteration", _step(now), PLAIN),
        ("interval", _interval(now), PLAIN),
        ("overhead", _overhead(now), WARN if (now.used_of_bound or 0.0) > ABOVE else PLAIN),
        ("last durable", _durable(now), PLAIN if now.last_durable_step is not None else WARN),
        ("last checkpoint", _last(now), PLAIN),
        *_what_next(now),
        ("lost per failure", f"{span(now.expected_loss_s)} on average", PLAIN),
        ("so far", _so_far(now), PLAIN),
    ]
    if now.uploaded_step is not None:
        sent = amount(now.total_uploaded_bytes)
        found.append(("mirror", f"iteration {number(now.uploaded_step)}, {sent} sent", PLAIN))
    if now.num_failed_in_row:
        text = f"{now.num_failed_in_row} in a row: {printable(now.last_error)}"
        found.insert(1, ("failing", text, BAD))
    return found


_WELL = (State.TRAINING, State.CLOSED, State.STOPPED, State.FINISHED)
_STATES = {
    State.TRAINING: "training",
    State.SILENT: "no news for longer than usual",
    State.KILLED: "killed: it did not say that it ended",
    State.CLOSED: "ended",
    State.FAILED: "ended by an error",
    State.STOPPED: "stopped, as it was told to",
    State.FINISHED: "finished",
    State.NONE: "no run yet",
}


def _run(now: Figures) -> str:
    text = f"{_STATES[now.state]}"
    if now.run:
        text = f"{now.run} of {now.num_runs}, {text}"
    if (now.world or 1) > 1:
        text += f", {now.world} ranks"
    return text if now.quiet_s is None else f"{text} (last event {span(now.quiet_s)} ago)"


def _step(now: Figures) -> str:
    about = "about " if now.is_estimated else ""
    pace = "" if not now.iteration_s else f", {span(now.iteration_s)} each"
    return "-" if now.step is None else f"{about}{number(now.step)}{pace}"


def _interval(now: Figures) -> str:
    if now.interval_steps is None:
        return "-"
    why = f", {printable(now.reason)}" if now.reason else ""
    return f"every {number(now.interval_steps)} iterations ({span(now.interval_s)}){why}"


def _overhead(now: Figures) -> str:
    if now.overhead is None:
        return "not measured yet"
    bound, used = now.max_overhead, now.used_of_bound
    if bound is None or used is None:
        return percent(now.overhead)
    return f"{percent(now.overhead)} of {percent(bound)} ({100 * used:.0f} % of the bound)"


def _durable(now: Figures) -> str:
    if now.last_durable_step is None:
        return "none yet"
    ago = "" if now.last_durable_age_s is None else f", {span(now.last_durable_age_s)} ago"
    return f"iteration {number(now.last_durable_step)}{ago}"


def _last(now: Figures) -> str:
    if now.checkpoint_bytes is None:
        return "-"
    parts = [amount(now.checkpoint_bytes)]
    if now.stall_s is not None:
        parts.append(f"held training {span(now.stall_s)}")
    if now.persist_s is not None:
        parts.append(f"persisted in {span(now.persist_s)} ({rate(now.bytes_per_s)})")
    return ", ".join(parts)


def _due(now: Figures) -> str:
    writing = ""
    if now.being_written_step is not None:
        writing = f"; {number(now.being_written_step)} is being written"
    if now.next_due_step is None:
        return f"-{writing}"
    when = "" if now.next_due_in_s is None else f", in {span(now.next_due_in_s)}"
    return f"iteration {number(now.next_due_step)}{when}{writing}"


def _what_next(now: Figures) -> list[Row]:
    """Of a run that goes on: what is due, and at risk; of a killed one: what is lost, and held."""
    if now.state in (State.TRAINING, State.SILENT):
        at_risk = _at_risk(now)
        return [("next due", _due(now), PLAIN), ("lost if killed now", at_risk, PLAIN)]
    found = []
    if now.lost_steps is not None:
        lost = (now.lost_least_steps or 0, now.lost_steps, now.lost_most_steps or 0)
        found.append(("lost by the kill", done_again(Loss(*lost)), WARN))
    if now.memory_step is not None:
        text = f"iteration {number(now.memory_step)}, {amount(now.memory_bytes)}, held for "
        text += f"{span(now.memory_left_s)} more: a run started on this machine takes it"
        found.append(("in memory", text, PLAIN))
    return found


def _at_risk(now: Figures) -> str:
    if now.at_risk_steps is None:
        return "-"
    about = "about " if now.is_estimated else ""
    return f"{about}{number(now.at_risk_steps)} iterations, {span(now.at_risk_s)}"


def _so_far(now: Figures) -> str:
    return (
        f"{number(now.num_committed)} durable, {number(now.num_failed)} failed, "
        f"{number(now.num_deferred)} deferred, {number(now.num_restored)} restored; "
        f"{amount(now.total_written_bytes)} written; training held {span(now.total_stall_s)}"
    )


def clock(now: Figures) -> str:
    """The time of day of the figures."""
    return time.strftime("%H:%M:%S", time.localtime(now.at_unix_s))
