"""The result tables of the pages, made from benchmarks/results/*.jsonl: never typed by hand.

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``. Of several lines with the
same setting the last one counts. Without a line there is no table, nor the text that belongs to it.
``python -m benchmarks.tables`` writes the pages and the plots anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.tables import (
    compare,
    frequency,
    goodput,
    interference,
    interruptions,
    iterators,
    limits,
    machinery,
    overhead,
    paper,
    scale,
    sharded,
    simulate,
)
from benchmarks.tables.common import Line, Table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")

TABLES = {
    "compare": Table("compare", compare.arms),
    "targets": Table("compare", compare.targets),
    "limits": Table("limits", limits.limits),
    "memory": Table("memory", machinery.memory),
    "startup": Table("startup", machinery.startup),
    "scale": Table("scale", scale.sizes),
    "tensors": Table("scale", scale.tensors),
    "sharded": Table("sharded", sharded.saves),
    "meeting": Table("sharded", sharded.meetings),
    "simulate": Table("simulate", simulate.policy),
    "goodput": Table("goodput", goodput.goodput),
    "overhead": Table("overhead", overhead.overhead),
    "frequency": Table("frequency", frequency.arms),
    "policies": Table("frequency", frequency.policies),
    "paper": Table("paper", paper.arms),
    "paper_stalls": Table("paper", paper.stalls),
    "decision": Table("decision", overhead.decision),
    "first": Table("first", overhead.first),
    "interference": Table("interference", interference.interference),
    "interruptions": Table("interruptions", interruptions.interruptions),
    "resume": Table("iterators", iterators.resume),
    "loading": Table("iterators", iterators.loading),
    "data_costs": Table("iterators", iterators.data_costs),
}

_PLACE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_pages() -> None:
    """Rewrite the tables of every page in place."""
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


def with_tables(text: str, *, results: Path = RESULTS) -> str:
    """The text with every table made anew from the committed result lines.

    The place of a table that nothing here makes stays as it is.
    """

    def made(place: re.Match[str]) -> str:
        table = TABLES.get(place[2])
        if table is None:
            return place[0]
        return f"{place[1]}{table.build(lines_of(table.benchmark, results))}{place[3]}"

    return _PLACE.sub(made, text)


def lines_of(benchmark: str, results: Path = RESULTS) -> list[Line]:
    """The committed lines of a benchmark, oldest first."""
    path = results / f"{benchmark}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables_of(lines: Iterable[Line]) -> Iterator[str]:
    """The tables of lines that were just measured, as Markdown."""
    by_benchmark: dict[str, list[Line]] = {}
    for line in lines:
        by_benchmark.setdefault(line["benchmark"], []).append(line)
    for table in TABLES.values():
        if text := table.build(by_benchmark.get(table.benchmark, [])):
            yield text
