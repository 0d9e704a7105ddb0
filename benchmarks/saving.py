"""A training loop around one `Saver`: what a save holds, adds and takes until it is durable.

The training is matrix products and a write to every parameter. On a GPU all clocks are read with
the device's work done, so that a wait on the device counts where it is waited for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.peers.saver import Saver

_SIDE = {"cpu": 512, "cuda": 4096}
_TRIALS = 20


def synchronize(device: torch.device) -> None:
    """Wait for the device, if there is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Products:
    """Forward and backward of an iteration: matrix products that last about ``seconds``."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        side = _SIDE[device.type]
        self.device = device
        self._matrix = torch.randn(side, side, device=device)
        self._count = 1
        self.compute()
        self._count = _TRIALS
        synchronize(device)
        began_s = time.perf_counter()
        self.compute()
        synchronize(device)
        each_s = (time.perf_counter() - began_s) / _TRIALS
        self._count = max(1, round(seconds / each_s))

    def compute(self) -> None:
        """The same work every time: what disturbs it makes it last longer."""
        for _ in range(self._count):
            self._matrix @ self._matrix


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds of one iteration, and of where a saver may hold the training thread."""

    total_s: float
    boundary_s: float
    entering_s: float

    @property
    def held_s(self) -> float:
        """Seconds in which it did."""
        return self.boundary_s + self.entering_s


def iterate(
    saver: Saver, work: Products, change: Callable[[], None], *, save: bool = False
) -> Iteration:
    """A boundary, forward and backward, the weight update."""
    synchronize(work.device)
    began_s = time.perf_counter()
    saver.boundary(save=save)
    boundary_s = time.perf_counter() - began_s
    work.compute()
    synchronize(work.device)
    asked_s = time.perf_counter()
    with saver.updating():
        synchronize(work.device)
        entering_s = time.perf_counter() - asked_s
        change()
    synchronize(work.device)
    return Iteration(time.perf_counter() - began_s, boundary_s, entering_s)


def sample(
    saver: Saver,
    work: Products,
    change: Callable[[], None],
    *,
    clean_iterations: int = 2,
    after_each: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Save once and train on until that is durable, and one iteration more.

    ``after_each`` is called behind every iteration, in no figure's time.
    """

    def one(*, save: bool = False) -> Iteration:
        iteration = iterate(saver, work, change, save=save)
        after_each()
        return iteration

    clean = [one() for _ in range(clean_iterations)]
    touched = [one(save=True)]
    while not saver.is_durable():
        touched.append(one())
    touched.append(one())
    iteration_s = statistics.median(each.total_s for each in clean)
    saved = saver.finish()
    return {
        "iteration_s": iteration_s,
        "save_s": touched[0].boundary_s,
        "held_s": sum(each.held_s for each in touched),
        "added_s": sum(each.total_s for each in touched) - len(touched) * iteration_s,
        "durable_s": saved.durable_s,
        **({} if saved.persist_s is None else {"persist_s": saved.persist_s}),
    }
