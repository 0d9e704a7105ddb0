"""The figures of the pages are the committed result lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.results import RESULTS
from benchmarks.plots import draw_all
from benchmarks.tables import PAGES, TABLES, with_tables

DECIMAL = re.compile(r"-?\d+\.\d+")

HOW = {
    "command": "python -m benchmarks.overhead",
    "commit": "abc1234",
    "machine": {"cores": 2, "accelerator": None},
    "versions": {"torch": "2.13.0"},
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_table_of_a_page_is_what_the_result_lines_say(page: Path) -> None:
    assert with_tables(page.read_text()) == page.read_text()


def test_every_table_has_a_place_and_rows_once_its_benchmark_was_measured() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for name, table in TABLES.items():
        start = text.index(f"<!-- table {name} -->")
        rows = text[start : text.index("<!-- end -->", start)].count("\n| ")
        is_measured = (RESULTS / f"{table.benchmark}.jsonl").exists()
        assert rows > 1 or not is_measured, f"the table {name} is empty"


def test_every_plot_is_what_the_result_lines_say(tmp_path: Path) -> None:
    drawn = draw_all(out=tmp_path)
    text = "".join(page.read_text() for page in PAGES)
    for path in drawn:
        words, numbers = parsed(path)
        committed_words, committed_numbers = parsed(RESULTS / path.name)
        assert words == committed_words, path.name
        assert numbers == pytest.approx(committed_numbers, abs=1e-4), path.name
        assert f"results/{path.name})" in text, f"no page shows {path.name}"
    assert {path.name for path in RESULTS.glob("*.svg")} == {path.name for path in drawn}


def parsed(plot: Path) -> tuple[list[str], list[float]]:
    """What lies between numbers, and the numbers, whose last digit depends on the processor."""
    words = DECIMAL.split(plot.read_text())
    return words, [float(text) for text in DECIMAL.findall(plot.read_text())]


def test_no_result_line_was_measured_on_uncommitted_code() -> None:
    paths = sorted(RESULTS.glob("*.jsonl"))
    assert paths
    for path in paths:
        assert '+", "machine"' not in path.read_text(), path.name


LIMIT = {"arm": "copy", "gib": 1.0, "gb_per_s": 2.0, "throughput_against_raw": 1.0, **HOW}


def limits_of(*lines: dict[str, Any], results: Path) -> str:
    (results / "limits.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    return with_tables("<!-- table limits -->\n<!-- end -->", results=results)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"storage": "nfs"}, ("ext4 on vda", "nfs")),
        ({"machine": {"cores": 8, "accelerator": None}}, ("2 cores", "8 cores")),
        ({"machine": {"cores": 2, "accelerator": "H"}}, ("no accelerator", "H")),
        ({"machine": {"cores": 2, "accelerator": None, "cpu": "X"}}, ("no CPU model", "X")),
    ],
)
def test_a_different_machine_or_disk_replaces_no_row(
    other: dict[str, Any], said: tuple[str, str], tmp_path: Path
) -> None:
    here = {**LIMIT, "storage": "ext4 on vda"}
    text = limits_of(here, {**here, "gb_per_s": 3.0}, {**here, **other}, results=tmp_path)
    first, second = said
    assert f"| 1 GiB, {first} | copy | 3.00 | 1.00 |" in text
    assert f"| 1 GiB, {second} | copy | 2.00 | 1.00 |" in text
