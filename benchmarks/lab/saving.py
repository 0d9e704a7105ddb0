"""The cost of one save while training continues: alone or on several ranks."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab.estimate import quartiles
from benchmarks.lab.saver import Saver

_CPU = torch.device("cpu")
#: Matrix products per calibration, and their number: the fastest gives the time of one.
_CALIBRATION, _CALIBRATIONS = 20, 15


class Work:
    """Forward and backward of an iteration: matrix products, then the ranks synchronise."""

    def __init__(self, seconds: float, *, device: torch.device = _CPU) -> None:
        self._device = device
        size = 512 if device.type == "cpu" else 4096
        self._matrix = torch.randn(size, size, device=device)
        self._count = 1
        self.compute()
        self._count = _CALIBRATION
        found_s = min(self._timed() for _ in range(_CALIBRATIONS))
        self._count = max(1, round(seconds * _CALIBRATION / slowest({"": found_s})[""]))

    def _timed(self) -> float:
        meet()
        return seconds_of(self.compute, self)

    def compute(self) -> None:
        """Always the same work, so a disturbance makes it take longer."""
        for _ in range(self._count):
            self._matrix @ self._matrix
        meet()

    def synchronize(self) -> None:
        """Wait for the training's stream, if there is one, not for copies beside it."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def seconds_of(call: Callable[[], object], work: Work) -> float:
    """The time until the call has returned and its work on the training's stream is done."""
    work.synchronize()
    began_s = time.perf_counter()
    call()
    work.synchronize()
    return time.perf_counter() - began_s


@dataclass(frozen=True, slots=True)
class Iteration:
    """The seconds of one iteration, and of the calls in which the library may stop training."""

    total_s: float
    boundary_s: float
    entering_s: float

    @property
    def held_s(self) -> float:
        """The seconds in which training was stopped."""
        return self.boundary_s + self.entering_s


def iterate(
    saver: Saver, change: Callable[[], None], work: Work, *, save: bool = False
) -> Iteration:
    """A boundary, forward and backward, and the weight update, which is ``change``."""
    meet()  # otherwise the wait for a late rank would be charged to the library
    work.synchronize()
    began_s = time.perf_counter()
    saver.boundary(save=save)
    work.synchronize()
    boundary_s = time.perf_counter() - began_s
    work.compute()
    work.synchronize()
    asked_s = time.perf_counter()
    with saver.updating():
        work.synchronize()
        entering_s = time.perf_counter() - asked_s
        change()
    work.synchronize()
    return Iteration(time.perf_counter() - began_s, boundary_s, entering_s)


def sample(
    saver: Saver,
    change: Callable[[], None],
    work: Work,
    *,
    clean_iterations: int = 3,
    recent_s: deque[float] | None = None,
) -> dict[str, float]:
    """Save once, and train until that is durable and for one more iteration.

    Returns ``held_s``, ``save_s`` (a part of it), ``added_s``, ``durable_s`` and, if known,
    ``persist_s``; of several ranks the slowest counts. ``added_s`` is relative to clean iterations
    before the save and those in ``recent_s``, to which they are added.
    """
    meet()
    clean_s = deque[float]() if recent_s is None else recent_s
    clean_s.extend(iterate(saver, change, work).total_s for _ in range(clean_iterations))
    touched = [iterate(saver, change, work, save=True)]
    while not everywhere(saver.is_durable()):
        touched.append(iterate(saver, change, work))
    touched.append(iterate(saver, change, work))
    saved = saver.finish()
    figures = {
        "held_s": sum(one.held_s for one in touched),
        "save_s": touched[0].boundary_s,
        "added_s": sum(one.total_s for one in touched) - len(touched) * statistics.median(clean_s),
        "durable_s": saved.durable_s,
    }
    if saved.persist_s is not None:
        figures["persist_s"] = saved.persist_s
    return slowest(figures)


#: Times for which training stops or is delayed, and the iteration they are compared with.
_HOLDS = ("held_s", "save_s", "added_s", "iteration_s")


def shown(seconds: Mapping[str, float]) -> dict[str, float]:
    """For result lines: times that stop training in milliseconds, durations in seconds."""
    return {
        f"{name.removesuffix('_s')}_ms" if _holds(name) else name: (
            round(value * 1e3, 3) if _holds(name) else round(value, 5)
        )
        for name, value in seconds.items()
    }


def spread(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """The quartiles, as ``low`` and ``high`` of a result line."""
    limits = {name: quartiles(values) for name, values in seconds.items()}
    return {
        "low": shown({name: low for name, (low, _) in limits.items()}),
        "high": shown({name: high for name, (_, high) in limits.items()}),
    }


def _holds(name: str) -> bool:
    return name.removeprefix("first_") in _HOLDS


def _are_many() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def meet() -> None:
    """Synchronise the ranks, as they do for their gradients."""
    if _are_many():
        dist.all_reduce(torch.zeros(1))


def everywhere(value: bool) -> bool:
    """Whether it holds on every rank."""
    if not _are_many():
        return value
    flag = torch.tensor([int(value)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def slowest(figures: Mapping[str, float]) -> dict[str, float]:
    """The largest value of each figure over the ranks, at least on the first; some may lack it."""
    if not _are_many():
        return dict(figures)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, dict(figures))
    names = {name for one in gathered for name in one}
    return {name: max(one[name] for one in gathered if name in one) for name in sorted(names)}
