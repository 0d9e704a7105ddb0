"""The result tables of the pages, generated from benchmarks/results/*.jsonl, never typed by hand.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``. Of several lines with the
same setting the last one counts. Without a line there is neither a table nor its introduction.
``python -m benchmarks.tables`` rewrites the pages and redraws the plots.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.callback import table as callback
from benchmarks.compare import table as compare
from benchmarks.crashtest import table as crashtest
from benchmarks.decision import table as decision
from benchmarks.endings import table as endings
from benchmarks.first import table as first
from benchmarks.frequency import table as frequency
from benchmarks.frozen import table as frozen
from benchmarks.goodput import table as goodput
from benchmarks.interference import table as interference
from benchmarks.interruptions import table as interruptions
from benchmarks.interval import table as interval
from benchmarks.iterators import table as iterators
from benchmarks.lab.results import RESULTS, ROOT, lines_of
from benchmarks.lab.tables import Table
from benchmarks.lightning_loop import table as lightning_loop
from benchmarks.limits import table as limits
from benchmarks.memory import table as memory
from benchmarks.mirror import table as mirror
from benchmarks.node import table as node
from benchmarks.overhead import table as overhead
from benchmarks.paper import table as paper
from benchmarks.ranks import table as ranks
from benchmarks.report import table as report
from benchmarks.restarts import table as restarts
from benchmarks.restore import table as restore
from benchmarks.scale import table as scale
from benchmarks.sharded import table as sharded
from benchmarks.simulate import table as simulate
from benchmarks.startup import table as startup
from benchmarks.summary import FINDINGS
from benchmarks.swapped import table as swapped
from benchmarks.traces import table as traces
from benchmarks.versions import table as versions
from benchmarks.watch import table as watch

PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "docs" / "endings.md")

TABLES: dict[str, Table] = {
    **callback.TABLES,
    **compare.TABLES,
    **crashtest.TABLES,
    **decision.TABLES,
    **endings.TABLES,
    **first.TABLES,
    **frequency.TABLES,
    **frozen.TABLES,
    **goodput.TABLES,
    **interference.TABLES,
    **interruptions.TABLES,
    **interval.TABLES,
    **iterators.TABLES,
    **lightning_loop.TABLES,
    **limits.TABLES,
    **memory.TABLES,
    **mirror.TABLES,
    **node.TABLES,
    **overhead.TABLES,
    **paper.TABLES,
    **ranks.TABLES,
    **report.TABLES,
    **restarts.TABLES,
    **restore.TABLES,
    **scale.TABLES,
    **sharded.TABLES,
    **simulate.TABLES,
    **startup.TABLES,
    **swapped.TABLES,
    **traces.TABLES,
    **versions.TABLES,
    **watch.TABLES,
}

_PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_pages() -> None:
    """Rewrite the tables of every page in place."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


def with_tables(text: str, *, results: Path = RESULTS) -> str:
    """The text with every table regenerated from the committed result lines."""

    def made(place: re.Match[str]) -> str:
        table = (TABLES | FINDINGS)[place[2]]
        return f"{place[1]}{table.build(lines_of(table.benchmark, results))}{place[3]}"

    return _PLACE.sub(made, text)


if __name__ == "__main__":
    from benchmarks.plots import draw_all

    write_pages()
    draw_all()
