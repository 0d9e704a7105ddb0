"""What a run reports of its checkpoints: events.jsonl, and a log line for each commit.

Of several ranks that share a directory only the leader writes the file; every rank keeps its
``last_event``. Belongs to the training thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from checkfreq.console import say
from checkfreq.events import Event, EventLog
from checkfreq.persist import protocol as p
from checkfreq.persist.attempts import Attempt

logger = logging.getLogger(__name__)


class RunLog:
    """Writes to ``events``. ``is_rank_0`` shows the run's first commit on the console."""

    def __init__(self, events: EventLog, *, is_rank_0: bool) -> None:
        self._events = events
        self._shows_commit = is_rank_0
        self._last_event: Event | None = None

    @property
    def last_event(self) -> Event | None:
        """The latest event of this process."""
        return self._last_event

    def record(self, kind: str, step: int, **data: object) -> None:
        """Record an event."""
        self._last_event = Event(kind, step, data)
        self._events.append(self._last_event)

    def committed(
        self,
        attempt: Attempt,
        reply: p.Committed,
        *,
        at_step: int,
        costs: Callable[[], Mapping[str, object]],
    ) -> None:
        """An attempt is durable; ``costs()``, called after the log line, is recorded with it.

        ``at_step``: how far training is by now.
        """
        copy_s = (attempt.copied_s or attempt.started_s) - attempt.started_s
        written_bytes = reply.num_bytes - reply.linked_bytes
        rate = written_bytes / max(reply.persist_s, 1e-9)
        if reply.warning:
            logger.warning("step %d is committed, but %s", attempt.step, reply.warning)
        if reply.kept_existing:
            logger.warning("step %d was already there and validates: kept as it is", attempt.step)
        say(
            logger,
            "checkpoint of step %d (%s): %.1f MiB, held training %.2f ms, copied in %.3f s, "
            "persisted in %.3f s (%.2f GB/s)",
            attempt.step,
            attempt.reason,
            written_bytes / 2**20,
            attempt.stall_s * 1e3,
            copy_s,
            reply.persist_s,
            rate / 1e9,
            is_shown=self._shows_commit,
        )
        self._shows_commit = False
        self.record(
            "committed",
            attempt.step,
            reason=attempt.reason,
            at_step=at_step,
            num_bytes=reply.num_bytes,
            linked_bytes=reply.linked_bytes,
            stall_s=attempt.stall_s,
            copy_s=copy_s,
            write_s=reply.write_s,
            persist_s=reply.persist_s,
            started_monotonic_s=None if attempt.is_inherited else attempt.started_s,
            durable_monotonic_s=attempt.durable_s,
            bytes_per_s=rate,
            direct=reply.direct,
            kept_existing=reply.kept_existing,
            costs=costs(),
        )

    def failed(self, attempt: Attempt, *, steps_at_risk: int) -> None:
        """An attempt failed; ``Alarm`` logs it, since that says what is at risk."""
        self.record(
            "failed",
            attempt.step,
            reason=attempt.reason,
            error=str(attempt.error),
            steps_at_risk=steps_at_risk,
        )
