"""Tables of `benchmarks.scale`: against the size of the state, and the number of tensors."""

from __future__ import annotations

from benchmarks.lab.tables import (
    Line,
    Table,
    introduced,
    newest_of_each_place,
    row,
    table,
    told_apart,
)

_SIZES = """\
Checkpoints against the size of the state, in 64 tensors, beside what disk and bus gave in the same
rounds (`1.00`: as fast as that limit; the median of the rounds' ratios). `held`: the training
thread stands still; `added`: what all iterations until durable took longer, the copy and the
writes taking CPU time from them. Memory: the peak of trainer and worker beyond the training's own,
of which the slots are two states. The restore verifies and reads past the page cache; its limits
are a raw read into memory that was in use, and into new memory.
"""

_TENSORS = """\
The same against the number of tensors, the size being fixed: an iteration in which nothing is due
(AUTO; of that median, the least and the most of several batches), and what one checkpoint holds
the training thread for at the boundary, where the state is captured:
"""


def sizes(lines: list[Line]) -> str:
    """A row per size; a sentence for each that did not fit."""
    of_sizes = [x for x in lines if x["what"] == "size"]
    lines = newest_of_each_place(of_sizes, "device", "gib")
    place = told_apart(lines)
    lines.sort(key=lambda x: (x["device"], place(x), x["gib"]))
    columns = (
        "state | held | added | durable after | persist / raw write | copy / bus "
        "| restore | / raw read | / into new memory | memory | / slots | rounds"
    )
    rows = [_size(x, place(x)) for x in lines if "why_not" not in x]
    reasons = [_why_not(x, place(x)) for x in lines if "why_not" in x]
    return introduced(_SIZES, table(columns, [*rows, *([""] if reasons else []), *reasons], lines))


def _size(x: Line, place: str) -> str:
    return row(
        f"{x['gib']:g} GiB, {x['device']}{place}",
        between(x, "held_ms", "ms", 1),
        between(x, "added_ms", "ms", 0),
        between(x, "durable_s", "s", 2),
        f"{x['persist_against_raw']:.2f}",
        f"{x['copy_against_bus']:.2f}",
        between(x, "restore_s", "s", 2),
        f"{x['restore_against_raw']:.2f}",
        f"{x['restore_against_fresh']:.2f}",
        f"{x['memory_gib']:.2f} GiB",
        f"{x['memory_against_slots']:.2f}",
        x["rounds"],
    )


def _why_not(x: Line, place: str) -> str:
    return f"{x['gib']:g} GiB, {x['device']}{place}: not measured, it {x['why_not']}.  "


def between(x: Line, name: str, unit: str, digits: int) -> str:
    """The median, with its quartiles."""
    low, median, high = (f"{v:.{digits}f}" for v in (x["low"][name], x[name], x["high"][name]))
    return f"{median} {unit} ({low} to {high})"


def tensors(lines: list[Line]) -> str:
    """A row per number of tensors."""
    of_tensors = [x for x in lines if x["what"] == "tensors"]
    lines = newest_of_each_place(of_tensors, "device", "mib", "tensors")
    place = told_apart(lines)
    lines.sort(key=lambda x: (x["device"], place(x), x["mib"], x["tensors"]))
    columns = (
        "tensors | iteration, nothing due | boundary with a checkpoint | per tensor "
        "| held in all | durable after | restore"
    )
    rows = [
        row(
            f"{x['tensors']:,} in {x['mib']:g} MiB, {x['device']}{place(x)}",
            _boundary(x),
            between(x, "save_ms", "ms", 2),
            f"{1e3 * x['save_ms'] / x['tensors']:.1f} µs",
            f"{x['held_ms']:.2f} ms",
            f"{x['durable_s']:.3f} s",
            f"{x['restore_s']:.3f} s",
        )
        for x in lines
    ]
    return introduced(_TENSORS, table(columns, rows, lines))


def _boundary(x: Line) -> str:
    if "boundary_us" not in x:
        return "-"
    low, median, high = (x[f"boundary_us{end}"] for end in ("_low", "", "_high"))
    return f"{median:.1f} µs ({low:.1f} to {high:.1f})"


TABLES = {"scale": Table("scale", sizes), "tensors": Table("scale", tensors)}
