"""The points that ``checkfreq simulate`` fits its costs of ranks to, from the result lines.

    python -m benchmarks.ranks.points

writes checkfreq/simulation/rank_costs.jsonl; a test fails while it is out of date. A line that has
``seconds``, and ``what`` of one of the costs (checkfreq/simulation/rank_costs.py), is a point. Of a
meeting it is the processor time of rank 0 and of the process that keeps the store, which no number
of machines divides: the latency measured here is that of all ranks on a few cores.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.lab.results import ROOT, lines_of
from benchmarks.lab.tables import Line, newest
from checkfreq.ranks.tree import FAN_IN
from checkfreq.simulation.rank_costs import COSTS

POINTS = ROOT / "checkfreq" / "simulation" / "rank_costs.jsonl"


def _meeting(line: Line) -> float | None:
    if line.get("arm") != f"tree of {FAN_IN}":
        return None
    return round((float(line["root_cpu_us"]) + float(line["store_cpu_us"])) / 1e6, 9)


#: For lines without ``seconds``, by what they measured.
_SECONDS: Mapping[str, Callable[[Line], float | None]] = {"meeting": _meeting}


def points(lines: list[Line]) -> Iterator[dict[str, object]]:
    """The newest point of each cost and number of ranks."""
    found = [
        {"what": line["what"], "ranks": line["ranks"], "seconds": seconds, "origin": _origin(line)}
        for line in lines
        if line["what"] in COSTS and (seconds := _seconds(line)) is not None
    ]
    order = sorted(newest(found, "what", "ranks"), key=lambda each: each["ranks"])
    yield from sorted(order, key=lambda each: COSTS.index(each["what"]))


def _seconds(line: Line) -> float | None:
    given: float | None = line.get("seconds")
    return _SECONDS.get(line["what"], lambda _: None)(line) if given is None else given


def _origin(line: Line) -> str:
    return f"{line['command']}, commit {line['commit']}, {line['machine']['cores']} cores"


def text(results: Path | None = None) -> str:
    """The whole file."""
    lines = lines_of("ranks") if results is None else lines_of("ranks", results)
    return "".join(f"{json.dumps(point)}\n" for point in points(lines))


if __name__ == "__main__":
    POINTS.write_text(text())
