"""The figures in Prometheus' text format: for a scrape, or node_exporter's textfile collector."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from checkfreq.errors import printable
from checkfreq.story.figures import Figures, State

_GAUGES = (
    ("step", "step", "Iterations passed; between events estimated from the time."),
    ("interval_steps", "interval_steps", "Iterations between two checkpoints."),
    ("iteration_seconds", "iteration_s", "Time of an iteration without checkpoints."),
    ("overhead_ratio", "overhead", "Time added by checkpoints, as a fraction."),
    ("overhead_bound_ratio", "max_overhead", "The bound of the overhead."),
    ("last_durable_step", "last_durable_step", "Step of the newest durable checkpoint."),
    ("last_durable_timestamp_seconds", "last_durable_unix_s", "When it was committed."),
    ("last_durable_age_seconds", "last_durable_age_s", "Time since it was committed."),
    ("checkpoint_bytes", "checkpoint_bytes", "Size of the newest durable checkpoint."),
    ("stall_seconds", "stall_s", "How long the newest one held training."),
    ("persist_seconds", "persist_s", "How long the newest one took to persist."),
    ("persist_bytes_per_second", "bytes_per_s", "Speed at which it was persisted."),
    ("next_due_step", "next_due_step", "Step of the next periodic checkpoint."),
    ("at_risk_steps", "at_risk_steps", "Iterations that a failure now would destroy."),
    ("at_risk_seconds", "at_risk_s", "Time since the state of the newest durable checkpoint."),
    ("expected_loss_seconds", "expected_loss_s", "Work that a failure destroys on average."),
    ("uploaded_step", "uploaded_step", "Newest step in the mirror."),
    ("failed_in_row", "num_failed_in_row", "Checkpoints that failed since the newest durable."),
    ("last_event_age_seconds", "quiet_s", "Time since the last event."),
)
_COUNTERS = (
    ("runs_total", "num_runs", "Runs that the events tell of."),
    ("committed_total", "num_committed", "Checkpoints that became durable."),
    ("failed_total", "num_failed", "Checkpoints that failed."),
    ("deferred_total", "num_deferred", "Checkpoints that had to wait."),
    ("restored_total", "num_restored", "Restores."),
    ("workers_died_total", "num_workers_died", "Workers that died and were replaced."),
    ("stall_seconds_total", "total_stall_s", "How long checkpoints held training."),
    ("written_bytes_total", "total_written_bytes", "Bytes written to storage."),
    ("uploaded_bytes_total", "total_uploaded_bytes", "Bytes sent to the mirror."),
)


def metrics(now: Figures, *, name: str) -> str:
    """All metrics, each with the label ``dir``. What is not known is left out."""
    label = f'dir="{_escaped(printable(name, keep=chr(10)))}"'
    lines: list[str] = []
    for kind, table in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        for metric, field, text in table:
            value = getattr(now, field)
            if value is not None:
                lines += _metric(metric, kind, text, [(label, value)])
    states = [(f'{label},state="{state.name.lower()}"', int(state is now.state)) for state in State]
    lines += _metric("state", "gauge", "1 for the state that the run is in.", states)
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, values: Sequence[tuple[str, float]]) -> Iterator[str]:
    yield f"# HELP checkfreq_{name} {text}"
    yield f"# TYPE checkfreq_{name} {kind}"
    for label, value in values:
        yield f"checkfreq_{name}{{{label}}} {value}"


def write_textfile(path: Path, text: str) -> None:
    """Replace a file as a whole: the collector may read it at any instant."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    os.chmod(file.name, 0o644)  # the collector is somebody else
    os.replace(file.name, path)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
