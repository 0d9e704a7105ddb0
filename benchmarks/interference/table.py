"""The table of `benchmarks.interference`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, percent, row, table

_SETTING = ("model", "bound", "static")


def interference(lines: list[Line]) -> str:
    """A row per arm and phase."""
    columns = (
        "model | arm | phase | iteration | interval | checkpoints | overhead "
        "| its second half | within the bound"
    )
    lines = [x for run in last_runs(lines) for x in run if "phase" in x]
    return table(columns, [_row(x) for x in lines], lines)


def last_runs(lines: list[Line]) -> list[list[Line]]:
    """The lines of the last run of each setting, newest last; a run begins with static, alone."""
    found: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        setting = tuple(line.get(name) for name in _SETTING)
        is_first = (line["arm"], line.get("phase")) == ("static", "alone")
        before = found.pop(setting, [])  # the newest comes last
        found[setting] = [line] if is_first else [*before, line]
    return list(found.values())


def _row(line: Line) -> str:
    static = "static, first interval" if line.get("static") == "first" else "static"
    half_width = line["half_width_late"]
    reach = "" if half_width is None else f" ± {percent(half_width)}"
    return row(
        line["model"],
        static if line["arm"] == "static" else line["arm"],
        line["phase"],
        f"{line['iteration_ms']:.0f} ms",
        f"{line['k_start']} → {line['k_end']}",
        line["checkpoints"],
        percent(line["overhead"]),
        f"{percent(line['overhead_late'])}{reach}",
        f"{_verdict(line['overhead_late'], half_width, line['bound'])} ({percent(line['bound'])})",
    )


def _verdict(mean: float, half_width: float | None, bound: float) -> str:
    """Whether a 95 % interval is within the bound; unclear if it contains it, or is unknown."""
    if half_width is None or mean - half_width <= bound < mean + half_width:
        return "unclear"
    return "yes" if mean <= bound else "no"


TABLES = {"interference": Table("interference", interference)}
