"""Asks the sources, each when it is worth asking, and tells what changed. One thread."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from checkfreq.notices.source import CLOCK, Clock, EndsAt, NoAnswerError, NoticeSource

#: Times that differ by less are the same: squeue rounds to seconds.
SAME_S = 2.0
#: A source that has not answered so often in a row is told of: less is a network that hiccups.
_UNANSWERED = 3
_LONGEST_PAUSE_S = 3600.0


@dataclass(frozen=True, slots=True)
class News:
    """What ``source`` says now. ``ends`` None: nothing, or not any more.

    ``at_s``: the end on the clock that all processes of a machine share, as of now; None if the
    time is not known. ``unanswered``: why there is no answer, which takes nothing back.
    """

    source: str
    ends: EndsAt | None
    at_s: float | None = None
    unanswered: str = ""


class NoticeWatch:
    """Watches ``sources``; ``tell`` is called with what is new, and raises OSError to end it."""

    def __init__(
        self,
        sources: Sequence[NoticeSource],
        *,
        tell: Callable[[News], object],
        clock: Clock = CLOCK,
    ) -> None:
        self._sources = sources
        self._tell = tell
        self._clock = clock
        self._due_s = {source.name: -math.inf for source in sources}
        self._told: dict[str, EndsAt | None] = {}
        self._num_unanswered = Counter[str]()
        self._is_over = threading.Event()

    def start(self) -> None:
        """Watch in a thread that does not keep the process alive."""
        threading.Thread(target=self.run, name="checkfreq-notices", daemon=True).start()

    def run(self) -> None:
        """Watch until ``stop``, or until nobody listens."""
        try:
            while not self._is_over.wait(self.look()):
                pass
        except OSError:
            return

    def stop(self) -> None:
        """End the thread, unless it is asking somebody; that ends by itself."""
        self._is_over.set()

    def look(self) -> float:
        """Ask the sources that are due; returns the seconds until the next one is."""
        for source in self._sources:
            if self._clock.monotonic_s() >= self._due_s[source.name]:
                self._ask(source)
        now_s = self._clock.monotonic_s()
        next_s = min(self._due_s.values(), default=math.inf)
        return min(_LONGEST_PAUSE_S, max(0.0, next_s - now_s))

    def _ask(self, source: NoticeSource) -> None:
        try:
            ends = source.poll()
        except Exception as error:  # whatever it is must not silence the other sources
            self._num_unanswered[source.name] += 1
            if self._num_unanswered[source.name] == _UNANSWERED:
                known = isinstance(error, NoAnswerError)
                why = str(error) if known else f"{type(error).__name__}: {error}"
                self._tell(News(source.name, None, unanswered=why))
        else:
            self._num_unanswered[source.name] = 0
            self._compare(source.name, ends)
        self._due_s[source.name] = self._clock.monotonic_s() + source.pause_s

    def _compare(self, name: str, ends: EndsAt | None) -> None:
        if name in self._told and _are_same(self._told[name], ends):
            return
        at_s = None
        if ends is not None and ends.at_unix_s is not None:
            at_s = self._clock.monotonic_s() + ends.at_unix_s - self._clock.unix_s()
        self._tell(News(name, ends, at_s))
        self._told[name] = ends


def _are_same(one: EndsAt | None, other: EndsAt | None) -> bool:
    if one is None or other is None or one.at_unix_s is None or other.at_unix_s is None:
        return one == other
    return one.why == other.why and abs(one.at_unix_s - other.at_unix_s) < SAME_S
