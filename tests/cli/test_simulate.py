"""``checkfreq simulate``: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from checkfreq.cli import main

RUN = ["simulate", "--iteration-s", "1", "--cost-s", "1", "--persist-s", "5", "--restart-s", "60"]

Capture = pytest.CaptureFixture[str]


def test_it_prints_a_line_for_each_size_and_way(capsys: Capture) -> None:
    assert main([*RUN, "--gpus", "8,100000", "--days", "3"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["GPUS", "MTBF", "INTERVAL", "CHOSEN", "GOODPUT"]
    assert [line.split()[0] for line in lines] == ["8"] * 7 + ["100000"] * 7
    assert lines[7].split()[:5] == ["100000", "17.7", "min", "29", "bound"]


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
        parts = row["goodput"] + row["overhead"] + row["lost"] + row["restarting"]
        assert parts == pytest.approx(1)


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
        (["--gpus", "8", "--max-overhead", "1.5"], "max_overhead"),
        (["--gpus", "8", "--max-overhead", "0"], "max_overhead"),
        (["--gpus", "8", "--interval-s", "-1"], "interval_s"),
        (["--gpus", "8", "--days", "0"], "--days"),
        (["--gpus", "8", "--cost-s", "-1"], "stall_s"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(
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
