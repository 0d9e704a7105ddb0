"""Tables of `benchmarks.sharded`: saves of several ranks, and their meetings."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, introduced, newest_of_each_place, place_label, table

_SAVES = """\
Several ranks: one save of a state that is sharded as by FSDP2, or replicated as by DDP (`split`:
each rank writes a part), beside `torch.distributed.checkpoint` with as many writer threads, synced
files and cached plans (`aside`: staging in a thread) and a raw direct write of the same bytes by
the same processes. Training continues meanwhile; of several ranks the slowest counts, from its call
until everything is committed (median, with the quartiles). `stops training for` is the time in the
library's calls, `added` the time by which all iterations until then were longer. The first save is
shown separately:
"""


def saves(lines: list[Line]) -> str:
    """A row per state, number of ranks and arm, the fastest to be durable first."""
    columns = (
        "state | ranks | library | stops training for | first save | added in all | durable after "
        "| first save | relative to raw"
    )
    saved = [x for x in lines if x["what"] != "meeting"]
    lines = sorted(
        newest_of_each_place(saved, "what", "mib", "world", "arm"),
        key=lambda x: (x["what"] != "sharded", x["world"], x["durable_s"]),
    )
    place = place_label(lines)
    rows = [
        f"| {x['what']}, {x['mib']:g} MiB{place(x)} | {x['world']} | {x['arm']} "
        f"| {_held(x, 'held_ms')} | {_held(x, 'first_held_ms')} | {_held(x, 'added_ms')} "
        f"| {_durable(x)} "
        f"| {x['first_durable_s']:.2f} s | {x['durable_against_raw']:.2f}{_persist_alone(x)} |"
        for x in lines
    ]
    return introduced(_SAVES, table(columns, rows, lines))


def _held(line: Line, figure: str) -> str:
    return f"{line[figure]:.1f} ms" if figure in line else "-"


def _durable(line: Line) -> str:
    """The median, with its quartiles if known."""
    if "durable_s" not in line.get("low", {}):
        return f"{line['durable_s']:.2f} s"
    low, median, high = (each["durable_s"] for each in (line["low"], line, line["high"]))
    return f"{median:.2f} s ({low:.2f} to {high:.2f})"


def _persist_alone(line: Line) -> str:
    alone = line.get("persist_against_raw")
    return f" (persist alone {alone:.2f})" if alone is not None else ""


_MEETINGS = """\
A meeting of the ranks, held when a checkpoint may be due or `meet_every_s` has passed, with nothing
to do (median):
"""


def meetings(lines: list[Line]) -> str:
    """A row per number of ranks."""
    met = newest_of_each_place([x for x in lines if x["what"] == "meeting"], "world")
    lines = sorted(met, key=lambda x: x["world"])
    place = place_label(lines)
    rows = [
        f"| {x['world']}{place(x)} | {x['median_ms']:.2f} ms | {x['meetings']} |" for x in lines
    ]
    return introduced(_MEETINGS, table("ranks | one meeting | meetings", rows, lines))


TABLES = {"sharded": Table("sharded", saves), "meeting": Table("sharded", meetings)}
