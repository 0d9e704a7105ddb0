"""What a source of notices is: something that can be asked when the run ends.

``poll`` runs on the worker's watch thread and takes a bounded time. A notice is taken back by
returning None later, or another time. A source that raises takes nothing back: a network fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EndsAt:
    """``source`` says that the run ends at ``at_unix_s``, and ``why``.

    ``at_unix_s`` None: it may end, and nobody knows when. That is only information.
    """

    source: str
    at_unix_s: float | None
    why: str


class NoAnswerError(Exception):
    """Whoever is asked is not there, or did not say anything that makes sense."""


class NoticeSource(Protocol):
    """Something that may know when the run ends."""

    @property
    def name(self) -> str:
        """As in ``CFConfig.notices``."""
        ...

    @property
    def pause_s(self) -> float:
        """Seconds until it is worth asking again; infinite if the answer will not change."""
        ...

    def poll(self) -> EndsAt | None:
        """The end that it knows of now; None if there is none.

        Raises NoAnswerError, or what parsing raises, without an answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class Clock:
    """Both clocks: the one of the world, which may jump, and one that all processes here share.

    On Linux ``time.perf_counter`` is CLOCK_MONOTONIC.
    """

    unix_s: Callable[[], float] = time.time
    monotonic_s: Callable[[], float] = time.perf_counter


#: The real ones.
CLOCK = Clock()


class Deadline:
    """The user's own: ``CFConfig.deadline``."""

    name = "deadline"
    pause_s = float("inf")

    def __init__(self, at_unix_s: float) -> None:
        self._ends = EndsAt(self.name, at_unix_s, "CFConfig.deadline")

    def poll(self) -> EndsAt:
        """See NoticeSource."""
        return self._ends
