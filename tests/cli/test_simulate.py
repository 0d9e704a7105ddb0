"""``checkfreq simulate``: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from checkfreq.cli import main

pytestmark = pytest.mark.slow

RUN = ["simulate", "--iteration-s", "1", "--cost-s", "1", "--persist-s", "5", "--restart-s", "60"]

Capture = pytest.CaptureFixture[str]


def test_it_prints_a_line_for_each_size_and_arm(capsys: Capture) -> None:
    run = [*RUN, "--rank-costs", "none"]  # what is measured of many ranks may change
    assert main([*run, "--gpus", "8,100000", "--days", "3"]) == 0
    printed, _, notes = capsys.readouterr().out.partition("\n\n")
    head, *lines = printed.splitlines()
    assert head.split()[:5] == ["GPUS", "MTBF", "CHOSEN", "ITERATIONS", "INTERVAL"]
    assert [line.split()[0] for line in lines] == ["8"] * 7 + ["100000"] * 7
    assert lines[7].split()[:7] == ["100000", "17.7", "min", "bound", "29", "29.0", "s"]
    assert "of the work done" in notes
    assert "*:" not in notes


def test_overhead_is_a_fraction_of_the_work_like_the_bound(capsys: Capture) -> None:
    # Of the time, a checkpoint of 1 s every 2 iterations is 33 %; of the work, 50 %.
    run = [*RUN[:-4], "--persist-s", "0", "--restart-s", "0", "--max-overhead", "0.5"]
    assert main([*run, "--mtbf-s", "1e6", "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (row["interval_steps"], row["interval_s"], row["gpus"]) == (2, 2.0, None)
    assert row["overhead"] == pytest.approx(0.5, rel=1e-3)
    assert row["checkpoints"] == pytest.approx(1 / 3, rel=1e-3)


def test_an_interval_limited_by_storage_is_marked_and_the_mark_explained(capsys: Capture) -> None:
    assert main([*RUN, "--mtbf-s", "1e6", "--interval-s", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (fixed,) = [line for line in lines if " fixed " in line]
    assert fixed.split()[:6] == ["-", "11.6", "d", "fixed", "5*", "5.0"]
    assert lines[-1] == "*: no shorter, or storage would not keep up."


@pytest.mark.parametrize(
    "given",
    [
        ["--cost-s", "0.01", "--persist-s", "10", "--gpus", "8"],
        ["--cost-s", "0.01", "--persist-s", "9.5", "--gpus", "8"],
        ["--cost-s", "1", "--persist-s", "30", "--gpus", "8"],
        ["--cost-s", "0", "--persist-s", "0", "--gpus", "8"],
        ["--cost-s", "1", "--persist-s", "30", "--gpus", "100000", "--rate", "spot"],
        ["--iteration-s", "1e-4", "--cost-s", "1", "--persist-s", "30", "--gpus", "8"],
    ],
)
def test_an_ordinary_call_returns(given: list[str], capsys: Capture) -> None:
    assert main([*RUN, *given, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 7


def test_json_is_one_object_per_line(capsys: Capture) -> None:
    assert main([*RUN, "--gpus", "64", "--mtbf-s", "600", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["arm"] for row in rows] == [
        "bound",
        "fixed",
        "young",
        "daly",
        "auto",
        "auto mtbf_s",
        "auto goodput",
    ]
    for row in rows:
        assert row["mtbf_s"] == 600
        parts = ("goodput", "checkpoints", "meetings", "lost", "restarting")
        assert sum(row[part] for part in parts) == pytest.approx(1)


def test_same_seed_prints_the_same(capsys: Capture) -> None:
    printed = []
    for seed in ("1", "1", "2"):
        main([*RUN, "--gpus", "100000", "--days", "2", "--seed", seed])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gpus", "0"], "num_gpus"),
        (["--gpus", "8,64", "--mtbf-s", "60"], "one number of --gpus"),
        (["--gpus", "8", "--mtbf-s", "-1"], "mtbf_s"),
        ([], "--gpus, or --mtbf-s"),
        (["--mtbf-s", "60", "--rate", "spot"], "give one of them"),
        (["--mtbf-s", "60", "--gpus", "0"], "num_gpus"),
        (["--gpus", "8", "--max-overhead", "1.5"], "max_overhead"),
        (["--gpus", "8", "--max-overhead", "0"], "max_overhead"),
        (["--gpus", "8", "--interval-s", "-1"], "interval_s"),
        (["--gpus", "8", "--days", "0"], "--days"),
        (["--gpus", "8", "--cost-s", "-1"], "stall_s"),
    ],
)
def test_invalid_arguments_are_refused_with_a_sentence(
    given: list[str], said: str, capsys: Capture
) -> None:
    assert main([*RUN, *given]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_sizes_must_be_numbers(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*RUN, "--gpus", "many"])
    assert stopped.value.code == 2
    assert "8,64,1024" in capsys.readouterr().err
