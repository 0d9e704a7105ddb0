"""Tables of `benchmarks.overhead`, `benchmarks.decision` and `benchmarks.first`."""

from __future__ import annotations

from statistics import median

from benchmarks.lab.tables import Line, Table, newest, percent, row, span, table

_SETTING = ("arm", "model", "bound", "threads", "batch", "run")


def overhead(lines: list[Line]) -> str:
    """A row per model and bound, over all runs."""
    columns = (
        "model | bound | runs within | k | overhead, median | highest estimate | highest limit"
    )
    lines = [x for x in newest(lines, *_SETTING) if x["arm"] in ("frozen", "live")]
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


def decision(lines: list[Line]) -> str:
    """What a boundary costs between checkpoints."""
    columns = "per iteration | slowest | allowed | iterations | memory growth"
    lines = newest(lines, "arm")
    rows = [
        f"| {x['added_us']:.1f} µs | {x['added_us_worst']:.1f} µs | {x['allowed_us']:.0f} µs "
        f"| {x['long']:,} | {x['python_grew_bytes'] / 1024:.1f} KiB in Python, "
        f"{x['process_grew_bytes'] / 1024:.0f} KiB in all |"
        for x in lines
    ]
    return table(columns, rows, lines)


def first(lines: list[Line]) -> str:
    """How soon a new run is protected."""
    columns = "device | state | slots ready | allowed | first durable after | allowed"
    lines = sorted(newest(lines, "device", "mib"), key=lambda x: (x["device"], x["mib"]))
    rows = [
        f"| {x['device']} | {x['mib']:g} MiB | {x['arena_s_per_gib']:.2f} s/GiB "
        f"| {x['arena_allowed_s_per_gib']:.0f} s/GiB | {x['first_durable_s']:.2f} s "
        f"| {x['allowed_s']:.2f} s |"
        for x in lines
    ]
    return table(columns, rows, lines)


TABLES = {
    "overhead": Table("overhead", overhead),
    "decision": Table("decision", decision),
    "first": Table("first", first),
}
