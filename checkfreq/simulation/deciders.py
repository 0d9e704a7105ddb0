"""What decides in a simulated run: a ``RateTuner``, an interval that never changes, given steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import Iteration, Measured, Verdict


class Interval(Protocol):
    """The part of a Plan that a simulation reads."""

    @property
    def interval_steps(self) -> int: ...


class Decider(Protocol):
    """The methods of ``RateTuner`` that a simulation calls."""

    @property
    def plan(self) -> Interval | None: ...

    def profile(self) -> Profile | None: ...

    def iteration(self, iteration: Iteration) -> None: ...

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None: ...

    def ended(self, attempt: str, *, end_s: float, measured: Measured | None) -> None: ...

    def continue_from(self, step: int) -> None: ...

    def met(self, seconds: float) -> None: ...

    def uploading(self, began_s: float, ended_s: float | None) -> None: ...

    def due(self, *, step: int, now_s: float) -> Verdict: ...


#: Makes a decider at the start and after each failure, given the profile measured before it.
NewDecider: TypeAlias = Callable[[Profile | None], Decider]


@dataclass(frozen=True, slots=True)
class _Every:
    interval_steps: int


class FixedInterval:
    """A checkpoint every so many steps, deferred only while both slots are taken.

    They are while two checkpoints are not durable yet, or the previous one is still being copied.
    How long a copy takes is known once a checkpoint is durable; until then it counts as endless.
    """

    def __init__(self, interval_steps: int) -> None:
        if interval_steps < 1:
            raise ConfigError(f"FixedInterval: expected at least 1 step, got {interval_steps}")
        self.plan = _Every(interval_steps)
        self._last_step = 0
        self._active: dict[str, float] = {}  # when each was started
        self._copy_s = math.inf

    def profile(self) -> Profile | None:
        """None: nothing is measured."""
        return None

    def iteration(self, iteration: Iteration) -> None:
        """Ignored: the interval is fixed."""

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None:
        """See RateTuner."""
        self._last_step = step
        self._active[attempt] = start_s

    def ended(self, attempt: str, *, end_s: float, measured: Measured | None) -> None:
        """See RateTuner."""
        self._active.pop(attempt, None)
        if measured is not None:
            self._copy_s = measured.copy_s

    def continue_from(self, step: int) -> None:
        """See RateTuner."""
        self._last_step = step

    def met(self, seconds: float) -> None:
        """Ignored: the interval is fixed."""

    def uploading(self, began_s: float, ended_s: float | None) -> None:
        """Ignored: the interval is fixed."""

    def due(self, *, step: int, now_s: float) -> Verdict:
        """See RateTuner."""
        if step - self._last_step < self.plan.interval_steps:
            return Verdict.NOT_YET
        return Verdict.LATE if self._is_late(now_s) else Verdict.TAKE

    def _is_late(self, now_s: float) -> bool:
        return len(self._active) > 1 or any(
            now_s < start_s + self._copy_s for start_s in self._active.values()
        )


class GivenSteps:
    """A checkpoint after each of the given steps, whatever it has to wait for."""

    plan = None

    def __init__(self, steps: Collection[int]) -> None:
        self._steps = frozenset(steps)

    def profile(self) -> Profile | None:
        """None: nothing is measured."""
        return None

    def iteration(self, iteration: Iteration) -> None:
        """Ignored."""

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None:
        """Ignored."""

    def ended(self, attempt: str, *, end_s: float, measured: Measured | None) -> None:
        """Ignored."""

    def continue_from(self, step: int) -> None:
        """Ignored."""

    def met(self, seconds: float) -> None:
        """Ignored."""

    def uploading(self, began_s: float, ended_s: float | None) -> None:
        """Ignored."""

    def due(self, *, step: int, now_s: float) -> Verdict:
        """See RateTuner."""
        return Verdict.TAKE if step in self._steps else Verdict.NOT_YET
