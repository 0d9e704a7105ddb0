"""``checkfreq plan``: from numbers and from what a run left behind; what it prints and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from checkfreq.cli import main
from checkfreq.events import Event, EventLog
from checkfreq.pacing.profile_cache import ProfileCache
from checkfreq.policy.profile import Profile
from checkfreq.store.fileops import LocalFileOps
from checkfreq.store.store import CheckpointStore
from tests.cli.golden import compare

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ["--iteration-s", "0.5", "--cost-s", "0.5", "--stall-s", "0.25", "--copy-s", "0.25"]
RUN = ["plan", *NUMBERS, "--persist-s", "8", "--state-bytes", "10G"]
MEASURED = Profile(
    iteration_s=0.25,
    overlap_s=0.1,
    host_copy_s=0.5,
    persist_s=2.0,
    durable_s=2.5,
    cost_s=0.125,
    cost_upper_s=0.25,
    state_bytes=1 << 30,
)

Write = Callable[[int], Path]
Capture = pytest.CaptureFixture[str]


def planned(argv: list[str], capsys: Capture) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def measured(store: CheckpointStore, write: Write) -> Path:
    """A directory as a run leaves it: costs, history, events, a checkpoint."""
    write(5)
    ProfileCache(store.root / "profile.json").store({"cpu": "some"}, MEASURED)
    log = EventLog(store.root / "events.jsonl", LocalFileOps(store.root))
    for step, stall_s in ((3, 0.01), (4, 0.02), (5, 0.03)):
        data = {"stall_s": stall_s, "num_bytes": 40, "linked_bytes": 8}
        log.append(Event("committed", step, data))
    return store.root


def test_json_is_one_document(capsys: Capture) -> None:
    found = planned([*RUN, "--gpus", "8", "--mtbf-s", "864000", "--restart-s", "60"], capsys)
    assert found["sources"] == ["options"]
    compare("plan", found["given"])
    assert [case["case"] for case in found["cases"]] == ["now", "storage x2", "ranks x2"]
    now = found["cases"][0]
    # Daly: sqrt(2 * 0.5 * 864000) s of work, and a little less.
    assert (now["interval_steps"], now["reason"]) == (1858, "failures")
    assert now["interval_s"] == now["interval_steps"] * 0.5
    assert now["expected_loss_s"] == now["interval_s"] / 2 + 8.25
    assert now["bytes_per_day"] == pytest.approx(1e10 * 86400 / (now["interval_s"] + 0.5))
    assert now["s3"]["storage"] == pytest.approx(28 * 10 * 0.023)
    assert set(found["clusters"][0]) == set(now) - {"case", "s3"}
    assert (found["clusters"][0]["num_gpus"], found["clusters"][0]["mtbf_s"]) == (8, 108000.0)


def test_the_costs_of_a_run_come_from_its_directory(measured: Path, capsys: Capture) -> None:
    found = planned(["plan", str(measured)], capsys)
    assert found["sources"] == ["events.jsonl", "profile.json", "step 5"]
    given = found["given"]
    assert (given["iteration_s"], given["cost_s"], given["durable_s"]) == (0.25, 0.125, 2.5)
    assert (given["stall_s"], given["num_bytes"], given["written_bytes"]) == (0.02, 40, 32)
    assert given["rate"] == "research"
    assert planned(["plan", str(measured), "--persist-s", "9"], capsys)["sources"][-1] == "options"


def test_events_are_enough_where_there_is_no_profile(measured: Path, capsys: Capture) -> None:
    (measured / "profile.json").unlink()
    log = EventLog(measured / "events.jsonl", LocalFileOps(measured))
    costs = {"iteration_s": 0.125, "cost_s": 0.25, "persist_s": 4.0, "durable_s": 5.0}
    log.append(Event("plan", 6, {**costs, "interval_steps": 3}))
    with (measured / "events.jsonl").open("a") as file:
        file.write('{"kind": "plan", "iteration_s": NaN, "cost_s": -1}\n[[[\n{"kind": "comm')
    found = planned(["plan", str(measured)], capsys)
    assert found["sources"] == ["events.jsonl", "step 5"]
    assert found["given"]["iteration_s"] == 0.125


def test_an_estimated_failure_rate_is_offered_but_not_assumed(
    measured: Path, capsys: Capture
) -> None:
    path = measured / "profile.json"
    document = json.loads(path.read_text())
    document["history"] = {"running_s": 36000.0, "failures": 10, "open": False, "lasted": True}
    path.write_text(json.dumps(document))
    assert main(["plan", str(measured)]) == 0
    out = capsys.readouterr().out
    assert (
        "Runs in this directory failed 10 times in 10.0 h of training: every 1.0 h (90 % "
        "confidence: 35.4 min to 1.8 h):\n--mtbf-s 3600.\n"
    ) in out
    assert "as published (research)" in out


def test_the_plot_is_written(tmp_path: Path) -> None:
    for name, begins in ("plan.svg", b"<?xml"), ("plan.png", b"\x89PNG"):
        assert main([*RUN, "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--mtbf-s", "60", "--rate", "spot"], "give one of them"),
        (["--mtbf-s", "-1"], "mtbf_s"),
        (["--keep", "0"], "kept checkpoints"),
        (["--plot", "plan.pdf"], ".png or .svg"),
        (["--plot", "no/such/folder/plan.svg"], "no/such/folder"),
    ],
)
def test_numbers_out_of_range_are_refused_with_a_sentence(
    given: list[str], said: str, capsys: Capture
) -> None:
    assert main([*RUN, *given]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_without_costs_it_says_where_to_get_them(store: CheckpointStore, capsys: Capture) -> None:
    assert main(["plan"]) == 2
    assert "give --iteration-s, --cost-s, --persist-s" in capsys.readouterr().err
    assert main(["plan", str(store.root), "--cost-s", "1"]) == 2
    assert "give --iteration-s, --persist-s\n" in capsys.readouterr().err
    assert main(["plan", str(store.root / "none")]) == 1
    assert "is not a directory" in capsys.readouterr().err
