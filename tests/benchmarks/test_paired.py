"""Where a window ends, and what counts as others' use of the CPU."""

from __future__ import annotations

import os
from collections import deque

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.lab.paired import Hooks, drain, user_and_stolen_s


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


def test_only_windows_with_hooks_run_hooks_be_they_of_one_optimizer_or_of_all() -> None:
    optimizer, calls = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), list[str]()
    optimizer.register_step_pre_hook(lambda *_: calls.append("one"))
    register_optimizer_step_pre_hook(lambda *_: calls.append("all"))
    hooks = Hooks(optimizer)
    optimizer.step()
    assert calls == []
    with hooks.attached():
        optimizer.step()
    optimizer.step()
    assert calls == ["all", "one"]


def test_time_in_the_kernel_is_not_foreign() -> None:
    line = "cpu  100 20 7000 50000 600 80 9000 3 0 0"
    assert user_and_stolen_s(line) == pytest.approx(123 / os.sysconf("SC_CLK_TCK"))
