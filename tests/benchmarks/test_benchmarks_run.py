"""Each benchmark runs to its end, at a size that shows nothing but that."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from checkfreq.examples.imagenet.options import is_installed
from tests.fork_server import FORK_SERVER

LIMIT_S = 400.0
TINY_RESTART = (
    *("--mib", "1", "--workers", "0", "--interval", "2", "--checkpoints", "2"),
    *("--rounds", "1", "--kills", "1", "--no-warm-up"),
)
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "arguments", "arms"),
    [
        ("memory", ["--mib", "1", "--saves", "20"], {None}),
        ("endurance", ["--checkpoints", "20"], {"1", "9", "growth"}),
        ("decision", ["--iterations", "300", "--repeats", "1", "--long", "300"], {"auto"}),
        ("first", ["--mib", "1", "--batch", "1"], {"auto"}),
        ("lightning_loop", ["--iterations", "50", "--repeats", "1"], {"callback"}),
        (
            "frozen",
            ["--frozen-mib", "4", "--trained-mib", "1", "--saves", "3", "--rounds", "1"],
            {"trained part alone", "with the frozen base"},
        ),
        (
            "watch",
            ["--rounds", "1", "--iterations", "40", "--every", "20", "--width", "32"],
            {"none", "watch", "watch --http, scraped", "watch --textfile", "TensorBoard"},
        ),
        (
            "crashtest",
            ["--steps", "20", "--wait", "0", "--kills", "1", "--arms", "clean"],
            {"clean"},
        ),
        (
            "interference",
            [
                *("--model", "transformer", "--batch", "1", "--settle", "0", "--phase", "0.1"),
                *("--stretch", "0.1", "--clean", "0.1"),
            ],
            {"static", "adaptive"},
        ),
        ("report", ["--events", "200", "--rounds", "1"], {"one run", "many runs", "a short run"}),
        ("mirror", ["--mib", "1", "--rounds", "2"], {"upload", "training"}),
        ("restarts", [*TINY_RESTART, "--arms", "memory", "both"], {"memory", "both"}),
    ],
)
def test_it_prints_a_result_line_per_arm(
    name: str, arguments: list[str], arms: set[str | None], tmp_path: Path
) -> None:
    lines = lines_of(name, *arguments, folder=tmp_path)
    assert arms <= {line.get("arm") for line in lines}
    assert all(line["benchmark"] == name and line["commit"] and line["versions"] for line in lines)
    assert all(line["storage"] for line in lines)


def test_meetings_print_a_line_per_number_of_ranks_and_arm(tmp_path: Path) -> None:
    small = ("--ranks", "2", "8", "--fan-in", "2", "--rounds", "1")
    lines = run_forked("ranks", *small, output=tmp_path / "stdout")
    arms = ["tree of 2", "star", "star, polled"]
    assert [(line["ranks"], line["arm"]) for line in lines] == [
        (n, a) for n in (2, 8) for a in arms
    ]
    assert all(line["root_cpu_us"] > 0 and line["store_cpu_us"] > 0 for line in lines)


def test_records_of_ranks_print_a_line_per_arm_and_use(tmp_path: Path) -> None:
    lines = run_forked("ranks", "--records", "4", output=tmp_path / "stdout")
    assert [(line["arm"], line["what"]) for line in lines] == [
        (arm, what)
        for arm in ("tree", "merged", "DCP")
        for what in ("commit", "restore", "reshard")
    ]
    # The points that simulations are fitted to.
    assert [line["what"] for line in lines if "seconds" in line] == ["commit", "restore"]


@pytest.mark.dist
def test_restores_of_a_node_print_a_line_for_reads_that_are_shared_and_those_that_are_not(
    tmp_path: Path,
) -> None:
    small = ("--mib", "8", "--ranks", "2", "--rounds", "2")
    shared, apart = lines_of("node", *small, folder=tmp_path)
    assert (shared["arm"], apart["arm"]) == ("shared", "each for itself")
    assert shared["storage"]
    assert shared["read_mib"] <= apart["read_mib"]  # none, in memory


def test_restores_print_a_line_per_memory_and_arm(tmp_path: Path) -> None:
    ours = ["checkfreq, restore()", "checkfreq.load(into=)", "checkfreq, from memory"]
    small = ("--gib", "0.004", "--tensors", "4", "--rounds", "2", "--spare", "200")
    lines = lines_of("restore", *small, "--arms", *ours, "torch.load(mmap=True)", folder=tmp_path)
    memories = {line["memory"] for line in lines}
    assert "plenty" in memories
    for memory in memories:  # "short" needs root
        by_arm = {line["arm"]: line for line in lines if line["memory"] == memory}
        assert list(by_arm) == ["raw", *ours, "torch.load(mmap=True)"]
        assert not any("failed" in line for line in by_arm.values())
        assert by_arm["raw"]["against_raw"] == 1.0
        assert all("met" in by_arm[arm] and by_arm[arm]["peak_mib"] < 512 for arm in ours)


@pytest.mark.skipif(not is_installed("torchvision"), reason="torchvision is not installed")
def test_the_iterators_print_a_line_per_arm_and_place(tmp_path: Path) -> None:
    small = ("--samples", "1000", "--repeats", "1", "--ids", "1000", "--pairs", "3")
    lines = lines_of("iterators", *small, "--images", "16", folder=tmp_path)
    by_part: dict[object, set[object]] = {}
    for line in lines:
        by_part.setdefault(line["what"], set()).add(line["arm"])
    assert by_part.keys() == {"resume", "order", "cost", "sample", "throughput"}
    assert by_part["resume"] >= {"checkfreq, DataLoader, 0 workers"}
    assert "DataLoader, 0 workers, 160 to 320 pixels" in by_part["throughput"]
    has_dali = is_installed("nvidia.dali")
    assert ("checkfreq, DALI, order only" in by_part["resume"]) == has_dali
    assert ("DALI, host, 375 to 500 pixels" in by_part["throughput"]) == has_dali


@pytest.mark.dist
def test_the_ranks_print_a_line_per_arm_of_each_state(tmp_path: Path) -> None:
    small = ("--mib", "1", "--tensors", "4", "--rounds", "1", "--iteration-s", "0.01")
    lines = lines_of("sharded", *small, "--ranks", "2", "--peers", "dcp.save", folder=tmp_path)
    *lines, meeting = lines
    assert (meeting["what"], meeting["world"]) == ("meeting", 2)
    assert "median_ms" in meeting
    assert meeting["storage"]
    assert all(line["storage"] and "low" not in line for line in lines)  # of one round
    assert [(line["what"], line["arm"]) for line in lines] == [
        ("sharded", "checkfreq"),
        ("sharded", "dcp.save"),
        ("sharded", "raw"),
        ("replicated", "checkfreq, one writer"),
        ("replicated", "checkfreq, split"),
        ("replicated", "raw"),
    ]
    figures = {"held_ms", "added_ms", "durable_s", "first_held_ms", "durable_against_raw"}
    assert all(figures <= line.keys() for line in lines if line["arm"] != "raw")
    assert all("persist_s" in line for line in lines if "checkfreq" in str(line["arm"]))


def test_boundaries_of_ranks_print_a_line_for_each_number_of_them(tmp_path: Path) -> None:
    (line,) = lines_of("boundaries", "--ranks", "2", "--seconds", "1", folder=tmp_path)
    assert line["world"] == 2
    assert {"share", "median_us", "checkpoints"} <= line.keys()


@pytest.mark.parametrize(
    ("name", "arguments", "arms"),
    [
        (
            "simulate",
            ["--seeds", "1", "--failures", "20"],
            {"closed form", "3-minute stall every 18 minutes", "bursty"},
        ),
        (
            "interval",
            [
                *("--seeds", "1", "--iterations", "300"),
                *("--cached-seeds", "2", "--cached-iterations", "120"),
            ],
            {"neighbours"},
        ),
        ("traces", ["replay", "throttled"], {"throttled"}),
    ],
)
def test_what_is_simulated_prints_a_line_for_each_arm(
    name: str, arguments: list[str], arms: set[str], tmp_path: Path
) -> None:
    lines = run_forked(name, *arguments, output=tmp_path / "stdout")
    assert arms <= {line.get("arm") for line in lines}


TINY_WINDOWS = ("--model", "transformer", "--batch", "1")


def lines_of(name: str, *arguments: str, folder: Path) -> list[dict[str, object]]:
    return run_forked(name, *arguments, "--folder", str(folder), output=folder / "stdout")


def run_forked(name: str, *arguments: str, output: Path) -> list[dict[str, object]]:
    """What ``python -m benchmarks.<name>`` prints, from a process that has torch already."""
    process = FORK_SERVER.Process(target=run_as_main, args=(name, arguments, output))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0, f"{process.exitcode}: {output.read_text()}"
    return [json.loads(line) for line in output.read_text().splitlines()]


def run_as_main(name: str, arguments: tuple[str, ...], output: Path) -> None:
    """Entry point of that process."""
    multiprocessing.set_start_method("fork", force=True)  # as without us
    warnings.simplefilter("ignore")
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, sys.stdout.fileno())
    os.chdir(ROOT)
    sys.argv = [name, *arguments]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    sys.stdout.flush()


def test_overhead_prints_auto_frozen_swept_and_smallest_interval(tmp_path: Path) -> None:
    short = ("--max-seconds", "0", "--warm-up-seconds", "0", "--auto-seconds", "0.1")
    lines = lines_of(
        "overhead",
        *(*TINY_WINDOWS, *short, "--window", "1", "--bounds", "0.9", "--sweep"),
        folder=tmp_path,
    )
    by_arm = {line["arm"]: line for line in lines}
    assert list(by_arm) == ["auto", "frozen", "sweep", "smallest"]
    assert by_arm["auto"]["k"] == by_arm["frozen"]["k"] == by_arm["smallest"]["k"]
    assert {"estimate", "low", "high", "rounds", "seconds", "met"} <= by_arm["frozen"].keys()
