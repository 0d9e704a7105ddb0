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


def test_a_table_without_result_lines_is_empty(tmp_path: Path) -> None:
    for name in TABLES:
        text = with_tables(f"<!-- table {name} -->\nold\n<!-- end -->", results=tmp_path)
        assert text == f"<!-- table {name} -->\n<!-- end -->"


def test_saves_and_meetings_of_ranks_are_shown_apart_each_with_its_text(tmp_path: Path) -> None:
    save = {"what": "sharded", "arm": "raw", "mib": 8, "world": 2, **HOW}
    save |= {"durable_s": 0.5, "first_durable_s": 0.75, "durable_against_raw": 1.0}
    meetings = [
        {"what": "meeting", "world": world, "meetings": 500, "median_ms": ms, **HOW}
        for world, ms in ((4, 0.3), (2, 9.0), (2, 0.1))
    ]
    lines = "".join(f"{json.dumps(x)}\n" for x in (save, *meetings))
    (tmp_path / "sharded.jsonl").write_text(lines)
    saves = with_tables("<!-- table sharded -->\n<!-- end -->", results=tmp_path)
    assert "Several ranks: one save" in saves
    assert saves.count("\n| ") == 2
    assert "| sharded, 8 MiB | 2 | raw | - | - | - | 0.50 s | 0.75 s | 1.00 |" in saves
    meeting = with_tables("<!-- table meeting -->\n<!-- end -->", results=tmp_path)
    assert "A meeting of the ranks" in meeting
    assert "| 2 | 0.10 ms | 500 |\n| 4 | 0.30 ms | 500 |" in meeting


LIMIT = {"arm": "copy", "gib": 1.0, "gb_per_s": 2.0, "throughput_against_raw": 1.0, **HOW}


def limits_of(*lines: dict[str, Any], results: Path) -> str:
    (results / "limits.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    return with_tables("<!-- table limits -->\n<!-- end -->", results=results)


def test_a_rate_is_shown_with_its_quartiles(tmp_path: Path) -> None:
    ends = {"low": {"gb_per_s": 1.5}, "high": {"gb_per_s": 2.25}}
    text = limits_of(LIMIT, {**LIMIT, "arm": "write", **ends}, results=tmp_path)
    assert "| 1 GiB | copy | 2.00 | 1.00 |" in text
    assert "| 1 GiB | write | 2.00 (1.50 to 2.25) | 1.00 |" in text


def test_known_storage_is_named_below_the_table(tmp_path: Path) -> None:
    text = limits_of({**LIMIT, "storage": "ext4 on vda"}, results=tmp_path)
    assert "commit abc1234, 2 cores, torch 2.13.0, ext4 on vda  \n" in text
    assert "| 1 GiB | copy |" in text  # one place needs no name


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


def test_a_save_of_ranks_is_shown_with_its_quartiles(tmp_path: Path) -> None:
    save = {"what": "sharded", "arm": "raw", "mib": 8, "world": 2, **HOW}
    save |= {"durable_s": 0.5, "first_durable_s": 0.75, "durable_against_raw": 1.0}
    save |= {"low": {"durable_s": 0.25}, "high": {"durable_s": 0.625}}
    (tmp_path / "sharded.jsonl").write_text(json.dumps(save))
    text = with_tables("<!-- table sharded -->\n<!-- end -->", results=tmp_path)
    assert "| 0.50 s (0.25 to 0.62) | 0.75 s | 1.00 |" in text


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
