"""Timer: what each phase took, on a clock that the test sets."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import StateError
from checkfreq.helpers import PhaseTime, Timer


class SetClock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def timer(clock: SetClock) -> Timer:
    return Timer(clock=clock)


def test_a_phase_adds_up_its_runs_and_those_that_raise(timer: Timer, clock: SetClock) -> None:
    with timer("forward"):
        pass
    assert "0.0%" in timer.report(), "no time has passed"
    timer.reset()
    for taken_s in (1.0, 3.0, 2.0):
        with contextlib.suppress(ValueError), timer("forward"):
            clock.now_s += taken_s
            raise ValueError
        clock.now_s += 10.0
    assert timer.totals() == {"forward": PhaseTime(3, 6.0, 3.0, 2.0)}
    assert "forward     3   6.000 s" in timer.report()
    assert timer.totals()["forward"].mean_s == 2.0


def test_phases_nest_also_in_themselves(timer: Timer, clock: SetClock) -> None:
    with timer("outer"):
        with timer("inner"), timer("outer"):
            clock.now_s += 1.0
        clock.now_s += 1.0
    assert timer.totals() == {
        "outer": PhaseTime(2, 3.0, 2.0, 2.0),
        "inner": PhaseTime(1, 1.0, 1.0, 1.0),
    }


def test_laps_count_from_one_to_the_next(timer: Timer, clock: SetClock) -> None:
    clock.now_s += 2.0
    assert timer.lap("load") == 2.0
    clock.now_s += 5.0
    timer.restart()
    clock.now_s += 3.0
    assert timer.lap("train") == 3.0
    assert [one.total_s for one in timer.totals().values()] == [2.0, 3.0]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"phases": {"a": [1, 2.0]}, "elapsed_s": 1.0},
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(
    state: Any, timer: Timer, clock: SetClock
) -> None:
    with timer("forward"):
        clock.now_s += 1.0
    with pytest.raises(StateError, match=r"expected a state_dict\(\) of a Timer"):
        timer.load_state_dict(state)
    assert list(timer.totals()) == ["forward"]


def test_a_tracked_timer_comes_back_with_the_checkpoint(tmp_path: Any, clock: SetClock) -> None:
    def manager(timer: Timer) -> CFManager:
        model = torch.nn.Linear(2, 1)
        chk = CFCheckpoint(model=model, timer=timer)
        return CFManager(tmp_path / "chk", chk, mode=CFMode.MANUAL, chk_freq=100)

    waits: list[float] = []
    timer = Timer(clock=clock, sync=lambda: waits.append(clock.now_s))
    waits.clear()  # the device is waited for where that was asked for
    with manager(timer) as cf_manager:
        cf_manager.restore()
        with timer("forward"):
            clock.now_s += 1.0
        cf_manager.step()
    resumed = Timer(clock=clock)
    with manager(resumed) as cf_manager:
        assert cf_manager.restore()
    assert waits[:2] == [100.0, 101.0]
    with resumed("forward"):  # it goes on adding up
        clock.now_s += 3.0
    assert resumed.totals() == {"forward": PhaseTime(2, 4.0, 3.0, 3.0)}
    assert resumed.elapsed_s == 4.0
