"""What this run was told about its end, and whether the last checkpoint must start now.

Signals act at once (`interrupt.py`). Other notices name a time: training goes on until the last
moment at which a checkpoint still becomes durable before it (`policy/ending.py`). Times of the
world are turned into ``time.perf_counter`` once, when they are heard of; if a source then names
another time, the end moves by the difference. So a clock that is set neither ends a run nor
prolongs it. Belongs to the training thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from checkfreq.config import CFConfig
from checkfreq.notices.requeue import REQUEUE_S
from checkfreq.notices.watch import SAME_S
from checkfreq.persist import protocol as p
from checkfreq.persist.attempts import Attempt
from checkfreq.policy.ending import LastCheckpoint, Needs
from checkfreq.run.interrupt import StopNotice

logger = logging.getLogger(__name__)
#: How long a run that stops may take where nobody said when it is killed, unless its last
#: checkpoint and upload should take longer: a disk may hang for good.
_UNKNOWN_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The run ends at ``at_s`` (``time.perf_counter``), says ``source``, and ``why``."""

    source: str
    why: str
    at_s: float
    at_unix_s: float

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self.at_unix_s))
        return f"the run ends at {when} ({self.why})"


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a run stops: ``source`` is a signal's name or a notice's source, ``why`` a sentence.

    ``ends_in_s``: seconds until the process will be ended; None if nobody said.
    """

    source: str
    why: str
    ends_in_s: float | None = None


class NoticeBoard:
    """The notices in force, one for each source."""

    def __init__(self) -> None:
        self._ends: dict[str, RunEnd] = {}
        self._possible: dict[str, str] = {}
        self._news: list[str] = []

    def note(self, notice: p.Notice) -> None:
        """A source said something."""
        if isinstance(notice, p.NoticeGone):
            self._gone(notice.source)
        elif isinstance(notice, p.NoticeUnanswered):
            logger.warning(
                "CFConfig.notices: %s does not answer (%s). Until it does, this run is not told by "
                "it when it will end. It is asked again and again",
                notice.source,
                notice.why,
            )
        elif notice.at_unix_s is None or notice.at_s is None:
            self._may_end(notice)
        else:
            self._ends_at(notice, at_unix_s=notice.at_unix_s, at_s=notice.at_s)

    def take_news(self) -> list[str]:
        """Sentences about what changed since the last call, for the log."""
        if not self._news:
            return self._news
        news, self._news = self._news, []
        return news

    @property
    def earliest(self) -> RunEnd | None:
        """The end in force: whatever comes first ends the run."""
        return min(self._ends.values(), key=lambda end: end.at_s) if self._ends else None

    def _gone(self, source: str) -> None:
        self._possible.pop(source, None)
        if (end := self._ends.pop(source, None)) is not None:
            self._news.append(f"{source}: no longer so: {end}")

    def _may_end(self, notice: p.NoticeSeen) -> None:
        self._gone_if_dated(notice.source)
        if self._possible.get(notice.source) != notice.why:
            self._possible[notice.source] = notice.why
            self._news.append(f"{notice.source}: {notice.why}; training goes on")

    def _gone_if_dated(self, source: str) -> None:
        if source in self._ends:
            self._gone(source)

    def _ends_at(self, notice: p.NoticeSeen, *, at_unix_s: float, at_s: float) -> None:
        known = self._ends.get(notice.source)
        if known is not None:
            moved_s = at_unix_s - known.at_unix_s
            if abs(moved_s) < SAME_S and notice.why == known.why:
                return
            at_s = known.at_s + moved_s
        end = RunEnd(notice.source, notice.why, at_s, at_unix_s)
        self._ends[notice.source] = end
        self._news.append(f"{notice.source}: {end}")


class LastMoment:
    """When the run ends, and when its last checkpoint must start to be durable before that.

    ``uploads_last``: False if the end does not wait for the last upload.
    """

    def __init__(
        self,
        signals: StopNotice,
        *,
        config: CFConfig,
        uploads_last: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.board = NoticeBoard()
        self._signals = signals
        self._grace_s = config.stop_grace_s
        self._reserve_s = config.stop_before_s + (REQUEUE_S if config.requeue else 0.0)
        self._uploads_last = uploads_last
        self._clock = clock
        self._patience_s = _UNKNOWN_GRACE_S
        self._stop_by_s: float | None = None
        self._is_closing = False
        self._end_s = math.inf
        self._last = LastCheckpoint()
        self._boundary_s: float | None = None
        self._was_epoch_end = False
        self._looked_at: RunEnd | None = None
        self._look_s = 0.0

    # ---- what is measured

    def ended(self, attempt: Attempt) -> None:
        """An attempt ended; one that is durable is measured."""
        if attempt.durable_s is not None:
            self._last.add_durable(attempt.durable_s - attempt.started_s)

    def pass_boundary(self, *, is_epoch_end: bool) -> None:
        """An iteration ended."""
        now_s = self._clock()
        if self._boundary_s is not None:
            self._last.add_gap(now_s - self._boundary_s, after_epoch=self._was_epoch_end)
        self._boundary_s, self._was_epoch_end = now_s, is_epoch_end

    @property
    def is_measured(self) -> bool:
        """Whether a checkpoint of this run became durable."""
        return self._last.is_measured

    def needs(
        self,
        *,
        state_bytes: int,
        started_s: tuple[float, ...],
        upload_s: float,
        cached_s: float | None,
    ) -> Needs:
        """See LastCheckpoint; ``started_s``: when each checkpoint in flight was begun."""
        now_s = self._clock()
        return self._last.needs(
            at_epoch_end=self._was_epoch_end,
            state_bytes=state_bytes,
            ages_s=tuple(now_s - each_s for each_s in started_s),
            upload_s=(upload_s if self._uploads_last else 0.0) + self._reserve_s,
            cached_s=cached_s,
        )

    # ---- what is known

    def end(self) -> Stop | None:
        """The end that is in force, however far off; None if none is."""
        end = self.board.earliest
        return None if end is None else Stop(end.source, str(end), end.at_s - self._clock())

    def due(self, needs: Callable[[], Needs]) -> Stop | None:
        """Why this rank alone would stop at this boundary; None if it would not."""
        if (stop := self.signalled()) is not None:
            return stop
        end = self.board.earliest
        if end is None or (end == self._looked_at and self._clock() < self._look_s):
            return None
        return self._due(end, needs())

    def _due(self, end: RunEnd, known: Needs) -> Stop | None:
        """Look whether it is time; if not, look again when half of the time is over.

        Until then, asking costs next to nothing at a boundary.
        """
        now_s = self._clock()
        left_s = end.at_s - now_s
        if known.must_start(left_s):
            return Stop(end.source, str(end), left_s)
        self._looked_at, self._look_s = end, now_s + known.spare_s(left_s) / 2
        return None

    def signalled(self) -> Stop | None:
        """The stop signal that was received; None if none was."""
        name, end = self._signals.received, self.board.earliest
        if name is None:
            return None
        known_s = [self.grace_left_s(), None if end is None else end.at_s - self._clock()]
        ends_in_s = min((left_s for left_s in known_s if left_s is not None), default=None)
        return Stop(name, f"{name} received", ends_in_s)

    def grace_left_s(self) -> float | None:
        """Seconds until a kill follows SIGTERM; None if none came, or if nobody said how soon."""
        came_s = self._signals.terminated_s
        if self._grace_s is None or came_s is None:
            return None
        return came_s + self._grace_s - self._clock()

    # ---- once it stops

    def stopping(self, stop: Stop, needs: Needs) -> None:
        """The run stops here: no wait goes on for ever from now on."""
        now_s = self._clock()
        usual_s = needs.durable_s - self._reserve_s
        self._patience_s = max(_UNKNOWN_GRACE_S, usual_s, self._grace_s or 0.0)
        self._stop_by_s = now_s + self._patience_s
        self._end_s = math.inf if stop.ends_in_s is None else now_s + stop.ends_in_s

    def closing(self, *, has_stopped: bool) -> None:
        """The manager is closed, which has a time of its own if the last checkpoint is durable.

        A script may have done something in between. Otherwise SIGTERM ends this wait too.
        """
        self._is_closing = True
        if has_stopped:
            self._stop_by_s = self._clock() + self._patience_s

    def left_s(self) -> float | None:
        """Seconds that the run may still wait; None if it was not told to stop."""
        if (grace_s := self.grace_left_s()) is not None:
            return grace_s
        by_s, came_s = self._stop_by_s, self._signals.terminated_s
        if by_s is None and self._is_closing and came_s is not None:
            by_s = came_s + self._patience_s
        return None if by_s is None else by_s - self._clock()

    def upload_left_s(self) -> float:
        """Seconds until a known end, if there is one, but for those needed after the upload."""
        reserve_s = self._reserve_s if self.grace_left_s() is None else 0.0
        return self._end_s - reserve_s - self._clock()
