"""Where a window ends, and what counts as others' use of the CPU."""

from __future__ import annotations

import os
from collections import deque

import pytest

from benchmarks.lab.paired import drain, user_and_stolen_s


class FakeManager:
    """Its pipeline has so many things left to do; each reaping ends one."""

    def __init__(self, left: int) -> None:
        self._left = deque(range(left))
        self._pipeline = self
        self.persistence = self

    @property
    def is_quiet(self) -> bool:
        return not self._left

    def reap(self) -> None:
        if self._left:
            self._left.popleft()


class FakeLoop:
    """Counts iterations."""

    def __init__(self) -> None:
        self.count = 0

    def iterate(self) -> None:
        self.count += 1


@pytest.mark.parametrize(("left", "iterations"), [(0, 0), (1, 0), (3, 2)])
def test_training_continues_until_no_background_work_is_left(left: int, iterations: int) -> None:
    loop = FakeLoop()
    assert drain(loop, FakeManager(left)) == loop.count == iterations


def test_time_in_the_kernel_is_not_foreign() -> None:
    line = "cpu  100 20 7000 50000 600 80 9000 3 0 0"
    assert user_and_stolen_s(line) == pytest.approx(123 / os.sysconf("SC_CLK_TCK"))
