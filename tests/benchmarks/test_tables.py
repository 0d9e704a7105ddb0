"""README's figures are the committed result lines."""

from __future__ import annotations

from benchmarks.tables import RESULTS, ROOT, with_tables


def test_every_table_of_the_readme_is_what_the_result_lines_say() -> None:
    text = (ROOT / "README.md").read_text()

    assert "<!-- table persist -->" in text
    assert with_tables(text) == text


def test_no_result_line_was_measured_on_uncommitted_code() -> None:
    for path in RESULTS.glob("*.jsonl"):
        assert '+", "machine"' not in path.read_text(), path.name
