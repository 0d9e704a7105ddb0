"""Tables of `benchmarks.scale`: by size of the state, and by number of tensors."""

from __future__ import annotations

from benchmarks.lab.tables import (
    Line,
    Table,
    introduced,
    newest_of_each_place,
    place_label,
    row,
    table,
)

_SIZES = """\
Checkpoints by size of the state, in 64 tensors, beside the speed of disk and bus in the same rounds
(`1.00`: as fast as that limit; the median of the rounds' ratios). `stopped`: how long the training
thread stops; `added`: by how much all iterations until durable were longer, because the copy and
the writes use CPU time. Memory: the peak of trainer and worker beyond the training's own; the slots
are two states of it. The restore verifies and bypasses the page cache; its limits are a raw read
into memory that was in use, and into new memory.
"""

_TENSORS = """\
The same by number of tensors, at a fixed size: an iteration in which nothing is due (AUTO; the
median, minimum and maximum over several batches), and how long one checkpoint stops the training
thread at the boundary, where the state is captured:
"""


def sizes(lines: list[Line]) -> str:
    """A row per size; a sentence for each that did not fit."""
    of_sizes = [x for x in lines if x["what"] == "size"]
    lines = newest_of_each_place(of_sizes, "device", "gib")
    place = place_label(lines)
    lines.sort(key=lambda x: (x["device"], place(x), x["gib"]))
    columns = (
        "state | stopped | added | durable after | persist / raw write | copy / bus "
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
    """The median with its quartiles."""
    low, median, high = (f"{v:.{digits}f}" for v in (x["low"][name], x[name], x["high"][name]))
    return f"{median} {unit} ({low} to {high})"


def tensors(lines: list[Line]) -> str:
    """A row per number of tensors."""
    of_tensors = [x for x in lines if x["what"] == "tensors"]
    lines = newest_of_each_place(of_tensors, "device", "mib", "tensors")
    place = place_label(lines)
    lines.sort(key=lambda x: (x["device"], place(x), x["mib"], x["tensors"]))
    columns = (
        "tensors | iteration, nothing due | boundary with a checkpoint | per tensor "
        "| stopped in all | durable after | restore"
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
