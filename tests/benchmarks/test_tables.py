"""README's figures are the committed result lines."""

from __future__ import annotations

from benchmarks.tables import RESULTS, ROOT, with_tables


def test_every_table_of_the_readme_is_what_the_result_lines_say() -> None:
    text = (ROOT / "README.md").read_text()

    assert with_tables(text) == text
    for name in ("persist", "restore", "stall", "memory", "startup"):
        start = text.index(f"<!-- table {name} -->")
        rows = text[start : text.index("<!-- end -->", start)].count("\n| ")
        assert rows > 1, f"the table {name} is empty"


def test_no_result_line_was_measured_on_uncommitted_code() -> None:
    paths = sorted(RESULTS.glob("*.jsonl"))
    assert paths
    for path in paths:
        assert '+", "machine"' not in path.read_text(), path.name
