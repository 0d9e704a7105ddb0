"""The page of a GPU proof: complete, and from the lines alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.gpu.page import page, read

RUN = {"event": "run", "part": 1, "dry": False, "limit_s": 410, "stage": "run", "at_s": 0.0}


def line(stage: str, **fields: Any) -> dict[str, Any]:
    return {**fields, "stage": stage, "at_s": 1.5}


def run_of(*stages: str, **more: Any) -> dict[str, Any]:
    return {**RUN, "stages": list(stages), **more}


def good(stage: str) -> dict[str, Any]:
    return line(stage, event="ends", ok=True, seconds=12.3456)


def test_the_page_has_every_figure_and_claim() -> None:
    lines = [
        run_of("machine", "stall"),
        line("machine", what="versions", torch="2.11.0", card="a GPU"),
        good("machine"),
        line("stall", what="save", arm="ours", held_ms=0.123456, ok=True),
        line("stall", what="save", arm="theirs", held_ms=None, durable_s=[1, 2.0]),
        line("stall", what="claim", is_dry=False, ok=False),
        line("stall", what="other claim", is_dry=False, ok=True),
        line("stall", part="first", torn=[]),
        good("stall"),
    ]
    expected = """\
# checkfreq on a GPU, part 1: PASSED

| stage | result | seconds |
|---|---|---|
| machine | passed | 12.35 |
| stall | passed | 12.35 |

## machine

| what | torch | card |
|---|---|---|
| versions | 2.11.0 | a GPU |

## stall

| what | arm | held_ms | ok | durable_s |
|---|---|---|---|---|
| save | ours | 0.1235 | yes | - |
| save | theirs | - | - | 1, 2 |

| what | is_dry | ok |
|---|---|---|
| claim | no | **no** |
| other claim | no | yes |

| part | torn |
|---|---|
| first | - |
"""
    assert page(lines) == expected


def test_what_failed_was_skipped_cut_off_or_not_reached_is_no_success_and_tests_are_counted() -> (
    None
):
    why = {"passed": "", "failed": "assert 1 == 2", "skipped": "needs two devices"}
    tests = [line("c", test=f"t::{one}", outcome=one, why=text) for one, text in why.items()]
    text = page(
        [
            run_of("a", "b", "c", "d"),
            line("a", event="ends", ok=False, problem="status 1", output=["no card"], seconds=1.0),
            line("b", event="skipped", why="9 s are left"),
            line("c", event="begins", limit_s=50),
            *(line("c", test=one["test"], outcome="started") for one in tests),
            *tests,
            line("c", test="t::hung", outcome="started"),
            line("c", what="first", ok=True),
        ]
    )
    assert text.startswith("# checkfreq on a GPU, part 1: FAILED\n")
    for row in (
        "| a | failed: status 1 | 1 |",
        "| b | skipped: 9 s are left | - |",
        "| c | cut off | - |",
        "| d | not reached | - |",
        "```text\nno card\n```",
        "| first | yes |",
        "Tests: 1 passed, 1 failed, 1 skipped, 1 started\n",
        "- skipped, 1: needs two devices",
        "- **failed** `t::failed`: assert 1 == 2",
        "- **started** `t::hung`: it did not end",
    ):
        assert row in text


def test_of_each_part_the_last_run_counts_and_a_line_that_was_cut_short_is_left_out(
    tmp_path: Path,
) -> None:
    old = [run_of("a"), line("a", what="old", ok=True), good("a")]
    second = [run_of("b", part=2), good("b")]
    lines = [*old, *second, run_of("a", dry=True), good("a")]
    path = tmp_path / "lines"
    path.write_text("\n".join(map(json.dumps, lines)) + '\n[1]\n{"sta')
    text = page(read([path]))
    assert "old" not in text
    assert text.index("part 1: PASSED, a dry run without a device") < text.index("part 2: PASSED\n")
