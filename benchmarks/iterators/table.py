"""Tables of `benchmarks.iterators`: resuming in mid-epoch, loading, and the parts of the cost."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, newest, percent, row, table


def resume(lines: list[Line]) -> str:
    """A row per loader and number of samples, a column per place in the epoch."""
    lines = _newest("resume", lines)
    places = sorted({x["place"] for x in lines})
    rows: dict[tuple[str, int], dict[float, Line]] = {}
    for x in lines:
        rows.setdefault((x["arm"], x["n"]), {})[x["place"]] = x
    columns = " | ".join(["loader", "samples", *(f"at {100 * place:g} %" for place in places)])
    cells = [
        row(arm, f"{n:,}", *(_milliseconds(found[place]) for place in places))
        for (arm, n), found in sorted(rows.items(), key=lambda item: item[0][1])
    ]
    reasons = sorted({f"Not possible: {x['why_not']}.  " for x in lines if "why_not" in x})
    return table(columns, [*cells, "", *reasons] if reasons else cells, lines)


def _milliseconds(line: Line) -> str:
    return "not possible" if line["milliseconds"] is None else f"{line['milliseconds']:.1f} ms"


def loading(lines: list[Line]) -> str:
    """Images per second with checkfreq, and the time it adds."""
    columns = "loader | images/s with checkfreq | added time | 95 % interval | allowed"
    lines = _newest("throughput", lines)
    rows = [
        f"| {x['arm']} | {x['images_per_s']:,.0f} | {percent(x['added'])} "
        f"| {percent(x['low'])} to {percent(x['high'])} | {percent(x['allowed'])} |"
        for x in lines
    ]
    return table(columns, rows, lines)


def data_costs(lines: list[Line]) -> str:
    """The cost of the order and of the state, in parts."""
    orders, costs, samples = (_newest(what, lines) for what in ("order", "cost", "sample"))
    rows = [
        *(
            f"| ids of {x['n']:,} in batches of {x['batch']} | {x['million_ids_per_s']:.1f} M/s |"
            for x in orders
        ),
        *(
            f"| {x['arm']} | {x['microseconds']:.1f} µs"
            f"{', {} bytes'.format(x['bytes']) if x['bytes'] else ''} |"
            for x in costs
        ),
        *(f"| a sample, {x['arm']} | {x['microseconds']:.1f} µs |" for x in samples),
    ]
    return table("what | cost", rows, [*orders, *costs, *samples])


def _newest(what: str, lines: list[Line]) -> list[Line]:
    return newest([x for x in lines if x["what"] == what], "arm", "n", "place")


TABLES = {
    "resume": Table("iterators", resume),
    "loading": Table("iterators", loading),
    "data_costs": Table("iterators", data_costs),
}
