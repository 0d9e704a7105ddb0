"""Table of how runs with a mirror end (`tests/slurm/test_endings.py`)."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.lab.tables import Line, Table, newest, table


def endings(lines: list[Line]) -> str:
    """A row per cause and state of the mirror, with the three ways to come back in each cell."""
    columns = (
        "told by | mirror | exit status | job | in the directory | in the mirror | ended after"
    )
    columns += " | was left"
    lines = newest(lines, "event", "mirror", "way")
    rows: dict[tuple[str, str], list[Line]] = {}
    for x in lines:
        rows.setdefault((x["event"], x["mirror"]), []).append(x)
    texts = [
        f"| {event} | {mirror} | {_each(row, _status)} | {_each(row, _job)} "
        f"| {_each(row, _durable)} | {_each(row, _mirrored)} "
        f"| {_each(row, _took)} | {_each(row, _left)} |"
        for (event, mirror), row in rows.items()
    ]
    return table(columns, texts, lines)


def _each(row: list[Line], text: Callable[[Line], str]) -> str:
    """What all ways have in common, or the three."""
    texts = [text(x) for x in row]
    return texts[0] if len({*texts}) == 1 else " / ".join(texts)


def _status(x: Line) -> str:
    return "killed" if x["status"] is None else str(x["status"])


def _job(x: Line) -> str:
    return {0: "cancelled", 1: "started again"}[x["num_restarts"]]


def _durable(x: Line) -> str:
    return _which(x["durable"], x["stopped_at"])


def _mirrored(x: Line) -> str:
    return _which(x["mirrored"], x["stopped_at"])


def _took(x: Line) -> str:
    return f"{x['took_s']:.0f} s"


def _left(x: Line) -> str:
    return f"{x['left_s']:.0f} s"


def _which(step: int | None, last: int) -> str:
    if step is None:
        return "none"
    return "the last step" if step == last else "an older one"


TABLES = {"endings": Table("endings", endings)}
