"""The first screen of the benchmarks' page: the table of alternatives, findings, missed targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.alternatives import alternatives
from benchmarks.summary import FINDINGS, compare_missed, decision_missed, interruptions, resume
from benchmarks.tables import PAGES, TABLES, with_tables
from tests.benchmarks.test_tables import HOW

TEXT = "".join(page.read_text() for page in PAGES)
COMPARED = {"device": "cpu", "gib": 1, "tensors": 64, **HOW}


def arm(name: str, *, added_ms: float, durable_s: float, **figures: Any) -> dict[str, Any]:
    figures = {"held_ms": 5.0, "added_ms": added_ms, "durable_s": durable_s, **figures}
    return {"arm": name, **COMPARED, **figures}


RAW = {"arm": "raw", "durable_s": 0.5, **COMPARED}


def cells(table: str, label: str) -> list[str]:
    (found,) = [line for line in table.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in found.strip("|").split("|")[1:]]


@pytest.mark.parametrize("name", FINDINGS)
def test_every_finding_has_a_place_and_its_name_is_no_table(name: str) -> None:
    assert f"<!-- table {name} -->" in TEXT
    assert name not in TABLES


@pytest.mark.parametrize("name", FINDINGS)
def test_a_finding_without_a_result_line_is_left_out(name: str, tmp_path: Path) -> None:
    text = with_tables(f"<!-- table {name} -->\n- old\n<!-- end -->", results=tmp_path)
    assert text == f"<!-- table {name} -->\n<!-- end -->"


def test_the_interval_and_the_loss_follow_from_the_cost_and_the_time_to_durable() -> None:
    lines = [RAW, arm("checkfreq", added_ms=35, durable_s=0.25, restore_s=2.5)]
    assert cells(alternatives(lines), "**checkfreq**") == [
        *("5 ms", "35 ms", "250 ms"),
        *("1.0 s", "750 ms", "2.5 s"),
    ]


def test_an_interval_is_not_shorter_than_a_checkpoint_takes_to_be_durable() -> None:
    lines = [RAW, arm("checkfreq", added_ms=-3, durable_s=2.0)]
    assert cells(alternatives(lines), "**checkfreq**")[3:] == ["2.0 s", "3.0 s", "-"]


def test_of_several_ways_to_save_the_one_that_loses_least_is_shown() -> None:
    thread = arm("dcp.async_save, thread", added_ms=700, durable_s=1.0)
    process = arm("dcp.async_save, process", added_ms=350, durable_s=1.0)
    restored = arm("dcp.save", added_ms=900, durable_s=1.0, restore_s=0.5)
    found = cells(
        alternatives([RAW, thread, process, restored]),
        "`torch.distributed.checkpoint`, `async_save`",
    )
    assert (found[1], found[-1]) == ("350 ms", "500 ms")


def test_the_largest_state_is_shown_without_failed_arms_or_gpus() -> None:
    small = arm("torch.save, synced", added_ms=1, durable_s=1.0) | {"gib": 0.5}
    failed = {"arm": "lightning, async, synced", "failed": "no memory", **COMPARED}
    gpu = arm("checkfreq", added_ms=1, durable_s=1.0) | {"device": "cuda", "gib": 8}
    ours = arm("checkfreq", added_ms=70, durable_s=1.0)
    table = alternatives([RAW, small, failed, ours, RAW | {"device": "cuda", "gib": 8}, gpu])
    assert "saving 1 GiB" in table
    assert table.count("\n| ") == 1
    assert "70 ms" in table


def test_staging_that_is_not_the_default_is_noted_below_the_table() -> None:
    ours = arm("checkfreq", added_ms=70, durable_s=1.0)
    aside = arm("dcp.async_save, thread, aside", added_ms=900, durable_s=1.0)
    assert "in a thread" not in alternatives([RAW, ours])
    assert "stops training for 5 ms and delays it by 900 ms" in alternatives([RAW, ours, aside])


def test_a_target_is_among_the_missed_ones_at_the_largest_state_only_if_it_was_missed() -> None:
    line = {"among": "all", "best": "x", "ratio": 2.0, "allowed": 1.0, **COMPARED}
    lines = [
        RAW,
        {**line, "target": "restore", "met": False},
        {**line, "target": "durable", "met": True},
        {**line, "target": "held", "met": None},
        {**line, "target": "held", "met": False, "gib": 0.5},
    ]
    (found,) = compare_missed(lines).splitlines()
    assert found.startswith("- **Time to restore, 1 GiB**: 2.00 times that of x (target: 1).")


def test_the_cost_of_an_iteration_is_missed_when_it_is_above_what_is_allowed() -> None:
    line = {"arm": "auto", "allowed_us": 20.0, **HOW}
    assert decision_missed([{**line, "added_us": 19.0}]) == ""
    assert "26 µs (target: 20 µs)" in decision_missed([{**line, "added_us": 26.0}])


def test_iterations_that_were_trained_again_are_added_up_over_all_trainings() -> None:
    common = {"seed": 0, "every_of_base": None, **HOW}
    lines = [
        {**common, "arm": name, "every_s": every_s, "redone": redone, "equal": equal}
        for name, every_s, redone, equal in (
            ("auto", 7, 2, True),
            ("auto", 30, 3, True),
            ("epoch boundary", 7, 40, None),
            ("epoch boundary", 30, 60, False),
        )
    ]
    found = interruptions(lines)
    assert "5 iterations had to be trained again, against 100 with a checkpoint" in found
    assert "2 of 3 ended with the same bits" in found


def test_the_finding_on_resuming_is_for_the_longest_epoch() -> None:
    line = {"what": "resume", "arm": "checkfreq, DataLoader, 0 workers", "place": 0.5, **HOW}
    lines = [
        {**line, "n": 1000, "milliseconds": 9.0},
        {**line, "n": 1_000_000, "milliseconds": 4.0},
    ]
    assert "middle of 1,000,000 samples is there after 4 ms" in resume(lines)
