"""Events of made-up runs, as trainers record them, at times that are given."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

START_S = 1_790_000_000.0
ITERATION_S = 0.25
INTERVAL = 40
#: From the boundary of a step to the instant at which it is durable; to that at which one is told.
DURABLE_S, TOLD_S = 3.0, 3.2
#: What the trainer's clock shows at `START_S`.
MONOTONIC_S = 5000.0

Event = dict[str, Any]


def event(kind: str, step: int, at_s: float, **data: object) -> Event:
    return {"time_unix_s": at_s, "kind": kind, "step": step, **data}


def began(step: int, at_s: float) -> Event:
    data = {"pid": 7, "host": "node-a", "world": 1, "mode": "auto", "max_overhead": 0.035}
    return event("began", step, at_s, **data)


def plan(step: int, at_s: float, *, interval: int = INTERVAL) -> Event:
    return event(
        "plan",
        step,
        at_s,
        explanation=f"every {interval} iterations: bound by the overhead budget, "
        "3.1 % of 3.5 % used, expected loss 6 s per failure",
        interval_steps=interval,
        reason="budget",
        iteration_s=ITERATION_S,
        measured_overhead=0.03,
        expected_loss_s=8.0,
    )


def committed(step: int, started_s: float) -> Event:
    """The checkpoint of a step whose boundary was at ``started_s``."""
    started = MONOTONIC_S + started_s - START_S
    return event(
        "committed",
        step,
        started_s + TOLD_S,
        reason="periodic",
        at_step=step + 12,
        num_bytes=1_200_000_000,
        linked_bytes=200_000_000,
        stall_s=0.012,
        copy_s=0.5,
        write_s=2.0,
        persist_s=2.5,
        started_monotonic_s=started,
        durable_monotonic_s=started + DURABLE_S,
        bytes_per_s=4e8,
        direct=True,
        kept_existing=False,
        costs={
            "interval_steps": INTERVAL,
            "iteration_s": ITERATION_S,
            "measured_overhead": 0.031,
            "expected_loss_s": 8.0,
        },
    )


def two_runs() -> list[Event]:
    """A run that was killed after the checkpoint of step 120, and one that goes on from there."""
    step_s = ITERATION_S * INTERVAL
    second_s = START_S + 100.0
    return [
        began(0, START_S),
        plan(10, START_S + 2.5),
        *(committed(40 * k, START_S + k * step_s) for k in (1, 2, 3)),
        event("failed", 160, START_S + 42.0, error="No space left", steps_at_risk=41),
        event("restored", 120, second_s, steps_lost=0, source="directory"),
        began(120, second_s + 1.0),
        plan(120, second_s + 1.0),
        committed(160, second_s + 11.0),
        event("uploaded", 160, second_s + 20.0, sent_bytes=1_200_000_000, upload_s=4.0),
    ]


def killed_runs(num: int, *, lasting_s: float = 600.0) -> list[Event]:
    """Runs that train, one after the other, with a pause in between; nobody says that they end."""
    found = []
    for number in range(num):
        at_s = START_S + number * 3 * lasting_s
        found += [began(0, at_s), event("deferred", number + 1, at_s + lasting_s, why="late")]
    return found


def write(chk_dir: Path, events: Iterable[Event], *, name: str = "events.jsonl") -> Path:
    """Write events as a run does; returns the directory."""
    chk_dir.mkdir(parents=True, exist_ok=True)
    with (chk_dir / name).open("w") as file:
        file.writelines(json.dumps(one) + "\n" for one in events)
    return chk_dir
