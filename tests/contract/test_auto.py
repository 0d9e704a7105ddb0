"""CFMode.AUTO through the manager: the interval is chosen, said, kept and carried on."""

from __future__ import annotations

import json
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq import CFManager, CFMode, load
from checkfreq.types import Objective
from tests.contract.runs import Training, config, generator_bits, managed

#: Boundaries within which the first checkpoint must have been begun: the one at which slots are
#: allocated, one until they are seen to be ready, two of warm-up, a clean one, one to spare.
FIRST = 6


def auto(chk_dir: Path, training: Training, **changes: Any) -> CFManager:
    settings = {"mode": CFMode.AUTO, "chk_freq": None, "max_overhead": 0.5, **changes}
    return managed(chk_dir, training.chk, **settings)


def planned(chk_dir: Path, training: Training, **changes: Any) -> CFManager:
    """A manager that has trained until it had a plan; still open."""
    manager = auto(chk_dir, training, **changes)
    for _ in range(20_000):
        training.steps(manager, 1)
        if manager.stats()["interval_steps"] is not None:
            return manager
    pytest.fail("no plan after 20,000 iterations")


def events(chk_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (chk_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def test_the_first_checkpoint_comes_after_the_profile_whatever_the_bound(chk_dir: Path) -> None:
    training = Training()
    with auto(chk_dir, training, max_overhead=1e-6) as manager:
        training.steps(manager, FIRST)
        manager.wait()
        assert len(manager.all_steps()) == 1


def test_a_plan_is_said_once_noted_told_as_data_and_there_at_once_after_a_resume(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, logger="checkfreq"),
        planned(chk_dir, Training(), dynamic=False) as manager,
    ):
        stats = manager.stats()
    assert json.loads(json.dumps(stats)) == stats
    measured = ("iteration_s", "overlap_s", "host_copy_s", "persist_s", "expected_loss_s")
    assert min(stats[name] for name in (*measured, "bytes_per_day")) > 0
    assert stats["durable_s"] >= stats["persist_s"]
    assert 0 <= stats["cost_s"] <= stats["cost_upper_s"]
    assert stats["place"] == "host"
    (said,) = [m for m in caplog.messages if m.startswith("checkpoints every")]
    (event,) = events(chk_dir, "plan")
    assert f"{event['explanation']}" in said
    assert " used, expected loss" in said
    assert event["interval_steps"] >= 1
    assert event["reason"] in ("budget", "storage", "floor")
    first, *_, last = (event["costs"] for event in events(chk_dir, "committed"))
    assert "interval_steps" not in first  # there is no plan yet
    assert {"iteration_s", "cost_s", "persist_s", "measured_overhead", "interval_steps"} <= {*last}
    resumed = Training(seed=1)
    with auto(chk_dir, resumed, dynamic=False) as manager:
        manager.restore()
        assert manager.stats()["interval_steps"] is None
        resumed.steps(manager, 1)
        profile = json.loads((chk_dir / "profile.json").read_text())["profile"]
        assert manager.stats()["cost_s"] == profile["cost_s"]
        assert manager.stats()["interval_steps"] is not None


def test_a_profile_of_another_state_is_not_used(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planned(chk_dir, Training()).close()
    other = Training(ema={"decay": torch.zeros(3)})
    with auto(chk_dir, other, fresh=True) as manager, caplog.at_level(logging.INFO):
        other.steps(manager, 1)
        assert manager.stats()["interval_steps"] is None
    assert "measured under other conditions: state: expected" in caplog.text


def test_profiling_draws_no_random_number_and_changes_no_state(chk_dir: Path) -> None:
    plain, watched = Training(), None
    for _ in range(30):
        plain.backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        plain.scheduler.step()
    expected = (plain.state_bits(), generator_bits())
    watched = Training()
    with auto(chk_dir, watched) as manager:
        watched.steps(manager, 30)
        assert (watched.state_bits(), generator_bits()) == expected
        manager.wait()
        assert manager.stats()["num_committed"] >= 1
        assert load(chk_dir, step=manager.latest_step())


# ---- failures of earlier runs


def history(chk_dir: Path, **changes: Any) -> dict[str, Any]:
    """The history in profile.json, after changing it."""
    path = chk_dir / "profile.json"
    document = json.loads(path.read_text())
    document["history"] |= changes
    path.write_text(json.dumps(document))
    return dict(document["history"])


def test_the_failure_rate_is_learned_and_shown_and_planned_with(chk_dir: Path) -> None:
    training = Training()
    planned(chk_dir, training).close()
    history(chk_dir, running_s=4000.0, failures=3, open=True, lasted=True)  # and it was killed
    goodput = config(objective=Objective.GOODPUT)
    with auto(chk_dir, training, config=goodput) as manager:
        manager.restore()
        training.steps(manager, 2)
        stats = manager.stats()
    assert (stats["failures_seen"], stats["mtbf_seen_s"], stats["mtbf_s"]) == (4, 1000.0, 1000.0)
    assert stats["mtbf_seen_low_s"] == pytest.approx(8000.0 / 18.307, rel=1e-3)
    assert stats["mtbf_seen_high_s"] == pytest.approx(8000.0 / 2.733, rel=1e-3)
    began = events(chk_dir, "began")[-1]
    assert (began["failures_seen"], began["running_s"]) == (4, 4000.0)
    assert history(chk_dir)["failures"] == 4


@pytest.mark.parametrize(
    ("error", "failures"), [(ValueError("a bug"), 1), (KeyboardInterrupt(), 0), (None, 0)]
)
def test_what_ends_a_run_decides_whether_it_failed(
    chk_dir: Path, error: BaseException | None, failures: int
) -> None:
    training = Training()
    with suppress(ValueError, KeyboardInterrupt), auto(chk_dir, training) as manager:
        training.steps(manager, 2)
        assert history(chk_dir)["open"] is True
        if error is not None:
            raise error
        # Told to stop it has not failed, even if it is killed before it has closed.
        os.kill(os.getpid(), signal.SIGTERM)
        training.steps(manager, 1)
        assert history(chk_dir)["open"] is False
    assert events(chk_dir, "ended")[-1].get("error") == (error and type(error).__name__)
    history(chk_dir, lasted=True)  # as after a minute
    with auto(chk_dir, training) as manager:
        manager.restore()
        training.steps(manager, 2)
    assert history(chk_dir)["failures"] == failures
