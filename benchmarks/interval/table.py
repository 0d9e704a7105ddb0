"""Tables of `benchmarks.interval`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, row, table


def interval(lines: list[Line]) -> str:
    """How close AUTO's interval comes to the ideal one, by load: median (90th percentile)."""
    columns = (
        "load | compared with | interval over ideal | in iterations 20 to 300 | longest plan | "
        "overhead over bound | above it by a tenth | worst 200 iterations | beyond the bucket | "
        "first checkpoint"
    )
    lines = newest([x for x in lines if "arm" in x], "load", "arm")
    rows = [
        row(
            x["load"],
            x["arm"],
            _two(x["interval_over_ideal"]),
            _two(x["early_over_ideal"]),
            _two(x["longest_plan_over_ideal"]),
            _two(x["overhead_over_bound"]),
            f"{100 * x['part_above_bound']:.1f} % of {x['runs']}",
            _two(x["window_over_bound"]),
            f"{100 * x['part_windows_above']:.1f} %",
            f"{x['first_step'][0]:.0f}",
        )
        for x in lines
    ]
    return table(columns, rows, lines)


def cached(lines: list[Line]) -> str:
    """What a cached profile does that is wrong, beside none: median (90th percentile)."""
    columns = (
        "load | cached profile | interval over ideal, in iterations 20 to 300 | longest plan | "
        "overhead over bound | above it by a tenth | discarded after"
    )
    lines = newest([x for x in lines if "profile" in x], "load", "profile")
    rows = [
        row(
            x["load"],
            x["profile"],
            _two(x["early_over_ideal"]),
            _two(x["longest_plan_over_ideal"]),
            _two(x["overhead_over_bound"]),
            f"{100 * x['part_above_bound']:.1f} % of {x['runs']}",
            "" if x["profile"] == "none" else _after(*x["discarded_after"]),
        )
        for x in lines
    ]
    return table(columns, rows, lines)


def _two(values: list[float | None]) -> str:
    middle, high = ("none" if value is None else f"{value:.2f}" for value in values)
    return f"{middle} ({high})"


def _after(middle: float | None, high: float | None) -> str:
    if middle is None:
        return "kept"
    return f"{middle:.0f} ({'kept' if high is None else f'{high:.0f}'})"


TABLES = {"interval": Table("interval", interval), "cached": Table("interval", cached)}
