"""The contract's ``stats()`` and ``last_event``: what happened, as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkfreq import KeepLast
from tests.contract.conftest import SetFault
from tests.contract.runs import Training, managed, running, written


def events(chk_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (chk_dir / "events.jsonl").read_text().splitlines()]


def test_stats_says_what_happened_as_data(chk_dir: Path) -> None:
    written(chk_dir, 1)
    with running(chk_dir, chk_freq=2) as (training, manager):
        manager.restore()
        training.steps(manager, 3)
        manager.wait()
        stats = manager.stats()
        event = manager.last_event
    assert event is not None
    assert (event.kind, event.step, event.data["reason"]) == ("committed", 4, "periodic")
    assert min(event.data["num_bytes"], event.data["bytes_per_s"]) > 0
    assert json.loads(event.to_json())["kind"] == "committed"
    assert json.loads(json.dumps(stats)) == stats
    expected = {
        "global_step": 4,
        "interval_steps": 2,
        "restored_step": 1,
        "restored_from": "directory",
        "last_durable_step": 4,
        "num_committed": 2,
        "num_failed": 0,
        "num_deferred": 0,
        "num_in_flight": 0,
        "num_workers_replaced": 0,
    }
    assert {name: stats[name] for name in expected} == expected
    assert stats["state_bytes"] > 0
    assert stats["stall_s"] > 0


def test_each_event_is_one_line_of_events_jsonl(chk_dir: Path, worker_fault: SetFault) -> None:
    worker_fault("commit.mkdir:raise-EIO:1")
    with running(chk_dir, retention=KeepLast(1)) as (training, manager):
        for _ in range(3):
            training.steps(manager, 1)
            manager.save()
            manager.wait()
    found = [(event["kind"], event["step"]) for event in events(chk_dir)]
    assert found[:4] == [("began", 0), ("failed", 1), ("committed", 2), ("committed", 3)]
    with managed(chk_dir, Training().chk) as manager:
        manager.restore()
    last = events(chk_dir)[-1]
    assert (last["kind"], last["step"], last["steps_lost"]) == ("restored", 3, 0)


def test_a_run_says_when_it_begins_and_ends_and_how_far_it_was_at_each_commit(
    chk_dir: Path,
) -> None:
    with running(chk_dir, chk_freq=1) as (training, manager):
        training.steps(manager, 2)
        manager.wait()
    first, *_, last = events(chk_dir)
    assert (first["kind"], first["world"], first["mode"]) == ("began", 1, "manual")
    assert "max_overhead" not in first  # the interval was chosen: no bound is kept to
    assert first["interval_steps"] == 1
    assert (last["kind"], last["step"], last["how"]) == ("ended", 2, "closed")
    saves = [event for event in events(chk_dir) if event["kind"] == "committed"]
    assert [save["step"] for save in saves] == [1, 2]
    assert saves[-1]["at_step"] == 2
    assert all(save["durable_monotonic_s"] > save["started_monotonic_s"] for save in saves)


def test_the_reason_of_a_checkpoint_is_recorded(chk_dir: Path) -> None:
    with running(chk_dir, chk_freq=2) as (training, manager):
        training.steps(manager, 2)
        manager.wait()
        manager.save()
        training.steps(manager, 1)
        manager.save(wait=True)
        training.steps(manager, 2)
        manager.wait()
        training.update(manager)
        manager.end_epoch()
        manager.wait()
        training.steps(manager, 1)
    committed = [event for event in events(chk_dir) if event["kind"] == "committed"]
    reasons = {event["step"]: event["reason"] for event in committed}
    assert reasons == {2: "periodic", 3: "requested", 4: "periodic", 6: "epoch", 7: "final"}


def test_an_unwritable_event_log_stops_nothing_and_is_said_once(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (chk_dir / "events.jsonl").mkdir(parents=True)
    with running(chk_dir, chk_freq=1) as (training, manager):
        for _ in range(3):
            training.steps(manager, 1)
            manager.wait()
        assert manager.all_steps() == [1, 2, 3]
    assert caplog.text.count("events are not being recorded") == 1
