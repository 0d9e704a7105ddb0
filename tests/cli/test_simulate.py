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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gpus", "8,64", "--mtbf-s", "60"], "one number of --gpus"),
        (["--gpus", "8", "--mtbf-s", "-1"], "mtbf_s"),
        ([], "--gpus, or --mtbf-s"),
        (["--mtbf-s", "60", "--rate", "spot"], "give one of them"),
        (["--gpus", "8", "--max-overhead", "1.5"], "max_overhead"),
        (["--gpus", "8", "--interval-s", "-1"], "interval_s"),
    ],
)
def test_invalid_arguments_are_refused_with_a_sentence(
    given: list[str], said: str, capsys: Capture
) -> None:
    assert main([*RUN, *given]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
