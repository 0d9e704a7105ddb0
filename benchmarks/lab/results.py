"""The committed result lines: benchmarks/results/*.jsonl, a file per benchmark."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.lab.tables import Line

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def lines_of(benchmark: str, results: Path = RESULTS) -> list[Line]:
    """The committed lines of a benchmark, oldest first."""
    path = results / f"{benchmark}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
