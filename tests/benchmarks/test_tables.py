"""README's figures are the committed result lines."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.tables import RESULTS, ROOT, with_tables

HOW = {
    "command": "python -m benchmarks.overhead",
    "commit": "abc1234",
    "machine": {"cores": 2, "accelerator": None},
    "versions": {"torch": "2.13.0"},
}


def test_every_table_of_the_readme_is_what_the_result_lines_say() -> None:
    text = (ROOT / "README.md").read_text()

    assert with_tables(text) == text
    for name in (
        *("persist", "restore", "stall", "memory", "startup"),
        *("overhead", "interference", "decision", "first", "simulate", "goodput"),
    ):
        start = text.index(f"<!-- table {name} -->")
        rows = text[start : text.index("<!-- end -->", start)].count("\n| ")
        assert rows > 1, f"the table {name} is empty"


def test_no_result_line_was_measured_on_uncommitted_code() -> None:
    paths = sorted(RESULTS.glob("*.jsonl"))
    assert paths
    for path in paths:
        assert '+", "machine"' not in path.read_text(), path.name


def test_tables_without_a_result_line_are_empty_and_not_an_error(tmp_path: Path) -> None:
    for name in ("overhead", "interference", "decision", "first", "sharded", "simulate", "goodput"):
        text = with_tables(f"<!-- table {name} -->\nold\n<!-- end -->", results=tmp_path)
        assert "old" not in text
        assert text.count("\n| ") == 1


def test_overhead_table_counts_the_newest_line_of_each_run(tmp_path: Path) -> None:
    run = {"arm": "frozen", "model": "m", "bound": 0.01, "threads": 1, "batch": 8, **HOW}
    lines = [
        {**run, "run": 1, "k": 9, "estimate": 0.02, "high": 0.03, "met": False},
        {**run, "run": 1, "k": 10, "estimate": 0.008, "high": 0.012, "met": True},
        {**run, "run": 2, "k": 11, "estimate": 0.006, "high": 0.013, "met": True},
    ]
    (tmp_path / "overhead.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    text = with_tables("<!-- table overhead -->\n<!-- end -->", results=tmp_path)
    assert "| m | 1.00 % | 2 of 2 | 10 to 11 | 0.70 % | 0.80 % | 1.30 % |" in text
