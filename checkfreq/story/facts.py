"""The facts of a story, as data and as text: the report's JSON, its tables. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from checkfreq.policy.failure_rate import FailureRate
from checkfreq.story.failing import failure_rate
from checkfreq.story.figures import Figures
from checkfreq.story.model import TROUBLES, Loss, Note, Run, Story
from checkfreq.types import Json, size_text

_MOST_TROUBLES = 100
#: So much of the bound on the overhead is above it, and no rounding.
ABOVE = 1.05


def facts(story: Story, now: Figures) -> Json:
    """Everything that the report says, without the curves."""
    return {
        "format_version": 1,
        "first_unix_s": story.runs[0].began_s if story.runs else None,
        "last_unix_s": max((run.last_s for run in story.runs), default=None),
        "num_events": story.num_events,
        "now": now.to_json(),
        "time": time_spent(story),
        "failures": _failures(failure_rate(story)),
        "runs": [_run(story, run) for run in story.runs],
        "troubles": [_note(note) for note in troubles(story)[-_MOST_TROUBLES:]],
        "num_troubles": sum(run.counts[kind] for run in story.runs for kind in TROUBLES),
    }


def _failures(rate: FailureRate) -> dict[str, float | int]:
    """How often runs failed, with limits; nothing but the running time where none did."""
    found = {"running_s": rate.running_s, **rate.facts()}
    return {name: value for name, value in found.items() if value is not None}


def time_spent(story: Story) -> dict[str, float]:
    """Where the time went, in seconds, from the first event to the last.

    ``training``: work that was kept. ``checkpoints``: what they added to it, as measured.
    ``lost``: work that was done again after a restore. ``down``: between runs, a restore included.
    """
    spent = {"training": 0.0, "checkpoints": 0.0, "lost": 0.0, "down": 0.0}
    for run in story.runs:
        began_s = run.restore.at_s if run.restore is not None else run.began_s
        lasted_s = max(0.0, run.last_s - began_s)
        overhead = run.overhead or 0.0
        added_s = lasted_s * overhead / (1.0 + overhead)
        spent["checkpoints"] += added_s
        spent["training"] += lasted_s - added_s
        spent["down"] += story.down_s(run)
        if (loss := story.loss(run)) is not None:
            lost_s = min(loss.work_s, spent["training"])
            spent["lost"] += lost_s
            spent["training"] -= lost_s
    return spent


def troubles(story: Story) -> list[Note]:
    """What went wrong, oldest first."""
    return [note for run in story.runs for note in run.notes if note.kind in TROUBLES]


def _note(note: Note) -> Json:
    return {"at_unix_s": note.at_s, "kind": note.kind, "step": note.step, "text": note.text}


def _run(story: Story, run: Run) -> Json:
    loss = story.loss(run)
    found: dict[str, Any] = {
        "run": run.number,
        "began_unix_s": run.began_s,
        "last_unix_s": run.last_s,
        "world": run.world,
        "mode": run.mode or None,
        "first_step": first_step(run),
        "reached_step": run.reached_step,
        "restored_step": None if run.restore is None else run.restore.step,
        "restored_from": None if run.restore is None else run.restore.source,
        "lost": None if loss is None else asdict(loss),
        "down_s": story.down_s(run),
        "num_committed": len(run.saves),
        "num_failed": run.counts["failed"],
        "num_deferred": run.counts["deferred"],
        "last_durable_step": run.saves[-1].step if run.saves else None,
        "stall_s": run.stall_s,
        "median_stall_s": _median(save.stall_s for save in run.saves),
        "median_persist_s": _median(save.persist_s for save in run.saves),
        "overhead": run.overhead,
        "max_overhead": run.max_overhead,
        "iteration_s": run.iteration_s,
        "written_bytes": run.written_bytes,
        "uploaded": len(run.uploads),
        "ended": run.how or None,
        "finished": run.is_finished,
    }
    return {name: value for name, value in found.items() if value is not None}


def done_again(loss: Loss) -> str:
    """``0 iterations``, ``41 iterations``, or ``about 60 iterations (41 to 81)``."""
    if loss.is_exact:
        return plural(loss.steps, "iteration")
    between = f"({number(loss.least_steps)} to {number(loss.most_steps)})"
    return f"about {plural(loss.steps, 'iteration')} {between}"


def first_step(run: Run) -> int | None:
    """Where training went on."""
    return run.restore.step if run.first_step is None and run.restore else run.first_step


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def span(seconds: float | None) -> str:
    """``800.0 ms``, ``12.0 s``, ``4.2 min``, ``3.1 h``, ``2.5 d``; "-" if not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (1.0 if unit == "s" else 2 * size):
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e3:.1f} ms" if seconds else "0 s"


def percent(fraction: float | None) -> str:
    """``3.5 %``."""
    return "-" if fraction is None else f"{100 * fraction:.2g} %" if fraction < 1 else ">= 100 %"


def number(value: int | None) -> str:
    """``12,345``; "-" if not known."""
    return "-" if value is None else f"{value:,}"


def amount(num_bytes: float | None) -> str:
    """``89.3 MiB``."""
    return "-" if num_bytes is None else size_text(int(num_bytes))


def rate(bytes_per_s: float | None) -> str:
    """``1.25 GB/s``, or in MB/s."""
    if bytes_per_s is None:
        return "-"
    return (
        f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"
    )


def plural(count: int, noun: str) -> str:
    """``1 run``, ``3 runs``."""
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"
