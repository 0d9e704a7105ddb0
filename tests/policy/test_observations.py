"""Which times a tuner accepts."""

from __future__ import annotations

from typing import Any

import pytest

from checkfreq.policy.observations import Iteration, Measured

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "iteration",
    [
        Iteration(2.0, 1.0),  # the clock went backwards
        Iteration(0.0, NAN),
        Iteration(0.0, 1.0, stall_s=-0.1),
        Iteration(0.0, 1.0, overlap_s=-0.1),
        Iteration(0.0, 1.0, waited_s=-1.0),
        Iteration(0.0, 1.0, waited_s=1.0),
    ],
)
def test_an_iteration_of_impossible_times_is_not(iteration: Iteration) -> None:
    assert not iteration.is_sane()


@pytest.mark.parametrize(
    "name", ["copy_s", "persist_s", "durable_s", "state_bytes", "device_copy_s"]
)
@pytest.mark.parametrize("value", [NAN, -1])
def test_a_checkpoint_of_impossible_times_is_not(name: str, value: Any) -> None:
    good = {"copy_s": 0.1, "persist_s": 1.0, "durable_s": 1.1, "state_bytes": 5}
    assert not Measured(**{**good, name: value}).is_sane()
