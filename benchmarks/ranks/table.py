"""Table of `benchmarks.ranks`: meetings by the number of ranks."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, introduced, newest_of_each_place, place_label, table

_MEETINGS = """\
A meeting at which all ranks vote and nothing is due, by the number of ranks: light processes that
hold a connection to a store in a process of its own. `tree of 16`: no rank reads more than 16
others' words; `star`: rank 0 reads all; `star, polled`: as it was before there was a tree, with
pauses between looks at the store that do not depend on the number of ranks. Processor time per
meeting, medians with quartiles over the rounds. Up to 17 ranks the tree is the star. With more
ranks than cores the latency is the processor time of all ranks together:
"""


def meetings(lines: list[Line]) -> str:
    """A row per number of ranks and arm."""
    met = [x for x in lines if x["what"] == "meeting"]
    lines = sorted(newest_of_each_place(met, "ranks", "arm"), key=lambda x: x["ranks"])
    place = place_label(lines)
    rows = [
        f"| {x['ranks']}{place(x)} | {x['arm']} "
        f"| {_us(x, 'root_cpu_us')} | {_us(x, 'rank_cpu_us')} "
        f"| {_us(x, 'store_cpu_us')} | {x['latency_ms']:.2f} ms |"
        for x in lines
    ]
    columns = "ranks | meeting | rank 0 | the median rank | the store | latency"
    return introduced(_MEETINGS, table(columns, rows, lines))


_RECORDS = """\
The records of many ranks, each with 1,000 tensors sharded by rows, in processor time. *Commit*: the
first rank's worker, once all parts are there. *Restore*, *reshard*: what one rank of as many, or of
half as many, reads and plans before it reads a tensor. `tree`: the record names the ranks' records;
`merged`: it holds them, as that of few ranks does; `DCP`: the global plan and `.metadata` of
`torch.distributed.checkpoint`, and reading that to plan the same shards. The last column is what
every rank reads:
"""

_WHATS = ("commit", "restore", "reshard")


def records(lines: list[Line]) -> str:
    """A row per number of ranks and arm."""
    found = newest_of_each_place([x for x in lines if x["what"] in _WHATS], "what", "ranks", "arm")
    place = place_label(found)
    by_row: dict[tuple[int, str], dict[str, Line]] = {}
    for line in found:
        by_row.setdefault((line["ranks"], line["arm"]), {})[line["what"]] = line
    rows = []
    for (ranks, arm), row in sorted(by_row.items(), key=lambda item: item[0][0]):
        seconds = " | ".join(f"{row[what]['processor_s']:.3g} s" for what in _WHATS)
        size = row["commit"]["record_bytes"] / 1e6
        rows.append(f"| {ranks:,}{place(row['commit'])} | {arm} | {seconds} | {size:,.2f} MB |")
    columns = "ranks | records | commit | restore | reshard | record"
    return introduced(_RECORDS, table(columns, rows, found))


def _us(line: Line, name: str) -> str:
    low, high = line["low"][name], line["high"][name]
    return f"{line[name]:,.0f} us ({low:,.0f} to {high:,.0f})"


TABLES = {
    "meetings_by_ranks": Table("ranks", meetings),
    "records_by_ranks": Table("ranks", records),
}
