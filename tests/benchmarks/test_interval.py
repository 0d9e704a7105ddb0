"""benchmarks.interval: the same seeds give the same numbers, and the table says what lines say."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from benchmarks.interval.cached import PROFILES
from benchmarks.interval.loads import LOADS
from benchmarks.interval.measure import ARMS, CACHED_LOADS, simulated
from benchmarks.interval.table import TABLES
from benchmarks.lab.tables import tables_of
from tests.benchmarks.test_benchmarks_run import run_forked


def test_every_load_and_arm_has_a_line_and_the_table_a_row(tmp_path: Path) -> None:
    noisy = ("--seeds", "1", "--iterations", "300")
    short = ("--cached-seeds", "2", "--cached-iterations", "120")
    lines = run_forked("interval", *noisy, *short, output=tmp_path / "lines")
    settings = [*product(LOADS, ARMS), *product(CACHED_LOADS, PROFILES)]
    assert [(x["load"], x.get("arm", x.get("profile"))) for x in lines] == settings
    assert {line["runs"] for line in lines if "arm" in line} == {5}
    assert {line["runs"] for line in lines if "profile" in line} == {10}
    noise, cached = tables_of(lines, TABLES)
    middle, high = lines[0]["interval_over_ideal"]
    assert f"| quiet | neighbours | {middle:.2f} ({high:.2f}) |" in noise
    middle, high = lines[len(LOADS) * len(ARMS) + 1]["early_over_ideal"]
    assert f"| quiet | right | {middle:.2f} ({high:.2f}) |" in cached


def test_a_seed_gives_the_same_run_each_time_and_another_seed_another() -> None:
    run = simulated("bursts", "neighbours", 500, ("host", 1))
    assert simulated("bursts", "neighbours", 500, ("host", 1)) == run
    assert simulated("bursts", "neighbours", 500, ("host", 2)) != run
