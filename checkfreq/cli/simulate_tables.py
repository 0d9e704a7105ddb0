"""What ``checkfreq simulate`` prints: a line per size and arm, restarts by source, and the fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from checkfreq.cli import text
from checkfreq.simulation.fitting import Fit
from checkfreq.simulation.rank_costs import COSTS, RankCosts

#: One line: what is printed as a row, and as an object with --json.
Row = dict[str, Any]

PARTS = ("goodput", "checkpoints", "meetings", "lost", "restarting")
_HEAD = ("GPUS", "MTBF", "CHOSEN", "ITERATIONS", "INTERVAL", "OVERHEAD", *map(str.upper, PARTS))
_NOTES = """\
ITERATIONS, INTERVAL: between two checkpoints; INTERVAL is work without them.
OVERHEAD: added by checkpoints, and by meetings of the ranks, of the work done (--max-overhead);
the rest: of all time."""
_LIMITED = "*: no shorter, or storage would not keep up."
_RETURNS_HEAD = ("GPUS", "CHOSEN", "FROM", "RESTARTS/DAY", "SHARE", "TAKES", "LOST WORK")
_RETURNS_NOTES = """\
Restarts by where the state is read, for the way to choose with the most goodput: how long one
takes, and the work that it loses, on average. A failure in a restart begins it anew."""
_FIT_HEAD = ("COST", "RANKS", "MEASURED", "FITTED", "DEVIATION")


def lines(rows: Sequence[Row], rank_costs: RankCosts, *, max_overhead: float) -> Iterator[str]:
    """All of it."""
    yield text.table(_HEAD, [_cells(row) for row in rows])
    yield ""
    yield _NOTES
    if any(row["limited"] for row in rows):
        yield _LIMITED
    yield from _met_too_often(rows, max_overhead)
    returns = [cells for row in _best(rows) for cells in _returns_cells(row)]
    if returns:
        yield ""
        yield text.table(_RETURNS_HEAD, returns)
        yield ""
        yield _RETURNS_NOTES
    sizes = sorted({row["gpus"] for row in rows if row["gpus"] is not None})
    if rank_costs.fits and sizes:
        yield ""
        yield from _fit_lines(rank_costs, sizes[-1])


def _met_too_often(rows: Sequence[Row], max_overhead: float) -> Iterator[str]:
    """A sentence if meetings alone add more than the bound allows."""
    sizes = [row["gpus"] for row in rows if row["meetings_of_work"] > max_overhead]
    if sizes:
        yield (
            f"From {min(sizes)} GPUs on, meetings alone add more than --max-overhead allows: auto "
            "spends\nhalf as much as it allows on checkpoints, in addition."
        )


def _best(rows: Sequence[Row]) -> list[Row]:
    """Of each size, the arm with the most goodput."""
    best: dict[object, Row] = {}
    for row in rows:
        if row["gpus"] not in best or row["goodput"] > best[row["gpus"]]["goodput"]:
            best[row["gpus"]] = row
    return list(best.values())


def _cells(row: Row) -> list[str]:
    steps, interval_s = row["interval_steps"], row["interval_s"]
    return [
        str(row["gpus"] or "-"),
        span(row["mtbf_s"]),
        row["arm"],
        f"{steps or '-'}{'*' if row['limited'] else ''}",
        "-" if interval_s is None else span(interval_s),
        *(f"{100 * row[name]:.2f} %" for name in ("overhead", *PARTS)),
    ]


def _returns_cells(row: Row) -> Iterator[list[str]]:
    for source, found in row.get("restarts", {}).items():
        if found["restarts"]:
            yield [
                str(row["gpus"]),
                row["arm"],
                source,
                f"{found['per_day']:.3g}",
                f"{100 * found['share']:.0f} %",
                span(found["takes_s"]),
                span(found["lost_s"]),
            ]


def _fit_lines(rank_costs: RankCosts, most: int) -> Iterator[str]:
    """The points beside the functions, the functions, and how far they are stretched."""
    points = [
        (what, str(point.ranks), _short(point.seconds), _short(fit.at(point.ranks)),
         _percent(fit.deviation(point)))
        for what, fit in rank_costs.fits.items()
        for point in fit.points
    ]  # fmt: skip
    yield text.table(_FIT_HEAD, points)
    yield ""
    for what, fit in rank_costs.fits.items():
        yield f"{what}: {_formula(fit)}, within {100 * fit.worst:.0f} % of what was measured"
        origins = sorted({point.origin for point in fit.points if point.origin})
        yield from (f"  ({origin})" for origin in origins)
        if fit.beyond(most) > 1:
            yield (
                f"  at {most} ranks {_short(fit.at(most))}: extrapolated, "
                f"{fit.beyond(most):.3g} times beyond the largest number measured"
            )
    missing = [what for what in COSTS if what not in rank_costs.fits]
    if missing:
        yield f"{', '.join(missing)}: not measured, counted as nothing"


def _percent(deviation: float) -> str:
    """``+29 %``; a dash for a point of 0 s, of which nothing is a part."""
    return f"{round(100 * deviation):+d} %" if math.isfinite(deviation) else "-"


def _formula(fit: Fit) -> str:
    """``350 us + 123 us * ranks``."""
    terms = (
        (fit.constant_s, ""),
        (fit.per_level_s, " * log16(ranks)"),
        (fit.per_rank_s, " * ranks"),
    )
    return " + ".join(f"{_short(value)}{name}" for value, name in terms if value) or "0 s"


def span(seconds: float) -> str:
    """``18 min``, ``3.1 h``, ``12.0 d``."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def _short(seconds: float) -> str:
    """``123 us``, ``88.3 ms``, ``12.3 s``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{1e6 * seconds:.3g} us"
