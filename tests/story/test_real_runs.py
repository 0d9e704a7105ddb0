"""The story of real runs: a manager that trains, is left without a word, and trains on."""

from __future__ import annotations

from pathlib import Path

from checkfreq.story.figures import State
from checkfreq.story.live import Live
from tests.contract.runs import Training, managed


def test_two_runs_of_a_manager_are_two_runs_of_the_story(tmp_path: Path) -> None:
    chk_dir = tmp_path / "chk"
    live = Live(chk_dir)
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=2) as manager:
        training.steps(manager, 4)
        manager.wait()
        now = live.look()
        assert (now.state, now.last_durable_step, now.interval_steps) == (State.TRAINING, 4, 2)
        assert now.max_overhead is None  # the interval was chosen: no bound is kept to
        training.steps(manager, 1)
    assert live.look().state is State.CLOSED
    training = Training()
    with managed(chk_dir, training.chk, chk_freq=2) as manager:
        manager.restore()
        training.steps(manager, 1)
        assert live.look().state is State.TRAINING
    now = live.look()
    assert (now.num_runs, now.num_restored, now.last_durable_step) == (2, 1, 6)
    first, second = live.story.runs
    loss = live.story.loss(second)
    assert loss is not None
    assert (loss.least_steps, loss.most_steps) == (0, 0)
    assert [run.how for run in (first, second)] == ["closed", "closed"]
    assert second.restore is not None
    assert second.restore.source == "directory"
