"""Every second that training is held is counted once, under the kind it was reported as."""

from __future__ import annotations

import pytest

from checkfreq.pacing.held_time import Held, HeldTime
from tests.pacing.test_timing import Clock


def test_a_boundarys_time_excludes_the_waits_and_meetings_within_it() -> None:
    clock = Clock()
    held = HeldTime(clock=clock)
    with held.boundary():
        clock.now_s += 1.0
        with held.waiting():
            clock.now_s += 8.0
        clock.now_s += 32.0
        held.met(32.0)
        clock.now_s += 2.0
    assert held.lap(on_device=False) == Held(stall_s=3.0, waited_s=8.0, met_s=32.0)


def test_a_lap_holds_what_came_since_the_last_one() -> None:
    clock = Clock()
    held = HeldTime(clock=clock)
    held.fence(1.0)
    assert held.lap(on_device=False) == Held(stall_s=1.0)
    assert held.lap(on_device=False) == Held()
    held.fence(0.5)
    held.met(0.25)
    assert held.lap(on_device=False) == Held(stall_s=0.5, met_s=0.25)


def test_what_the_host_does_while_a_device_has_work_queued_holds_no_training() -> None:
    clock = Clock()
    device_wait_s = 0.0
    held = HeldTime(device_wait_s=lambda: device_wait_s, clock=clock)
    with held.boundary():
        clock.now_s += 1.0
    held.met(2.0)
    device_wait_s = 4.0
    assert held.lap(on_device=True) == Held(stall_s=4.0)
    assert held.fence_s == 4.0


def test_a_wait_counts_even_if_it_ends_in_an_error() -> None:
    clock = Clock()
    held = HeldTime(clock=clock)
    with pytest.raises(KeyboardInterrupt), held.waiting():
        clock.now_s += 1.0
        raise KeyboardInterrupt
    assert held.lap(on_device=False) == Held(waited_s=1.0)


def test_checkpoints_hold_training_for_snapshots_and_fences_on_host_and_device() -> None:
    held = HeldTime(device_wait_s=lambda: 4.0)
    held.snapshot(1.0)
    held.fence(2.0)
    held.met(8.0)
    assert held.checkpoints_s == 7.0
