"""Table of `benchmarks.overhead`."""

from __future__ import annotations

from statistics import median

from benchmarks.lab.tables import Line, Table, newest, percent, row, span, table

SETTING = ("arm", "model", "bound", "threads", "batch", "run")
#: The arms whose overhead was measured in paired windows.
MEASURED = ("frozen", "live")


def overhead(lines: list[Line]) -> str:
    """A row per model and bound, over all runs."""
    columns = (
        "model | bound | runs within | k | overhead, median | highest estimate | highest limit"
    )
    lines = [x for x in newest(lines, *SETTING) if x["arm"] in MEASURED]
    groups: dict[tuple[str, float], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["model"], line["bound"]), []).append(line)
    rows = []
    for (model, bound), runs in sorted(groups.items()):
        highs = [x["high"] for x in runs if x["high"] is not None]
        rows.append(
            row(
                model,
                percent(bound),
                f"{sum(x['met'] for x in runs)} of {len(runs)}",
                span([x["k"] for x in runs]),
                percent(median(x["estimate"] for x in runs)),
                percent(max(x["estimate"] for x in runs)),
                percent(max(highs, default=None)),
            )
        )
    return table(columns, rows, lines)


TABLES = {"overhead": Table("overhead", overhead)}
