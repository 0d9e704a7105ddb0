"""Reports while checkpoints fail: since when nothing is durable, and what a kill would lose.

Storage may fail for hours. Training goes on, retries come at growing pauses, and each failure is
logged as one ERROR and passed to ``CFConfig.on_failure``; so is the first success afterwards, as
a WARNING. Belongs to the training thread. ``clock`` measures pauses; ``wall`` is for people.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from checkfreq.errors import CheckFreqError
from checkfreq.events import FailureNotice
from checkfreq.policy.backoff import Backoff

logger = logging.getLogger(__name__)


class Alarm:
    """Counts failures in a row, and knows the newest durable checkpoint before them.

    With ``tolerate_failures`` None there are pauses between tries. With a number there are none:
    the next interval tries again, since that many failures in a row end the training.
    ``current_step`` tells how many boundaries training has passed.
    """

    def __init__(
        self,
        *,
        tolerate_failures: int | None,
        on_failure: Callable[[FailureNotice], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        current_step: Callable[[], int] = lambda: 0,
    ) -> None:
        self._tolerate_failures = tolerate_failures
        self._on_failure = on_failure
        self._clock = clock
        self._wall = wall
        self._backoff = Backoff()
        self._durable_step: int | None = None
        self._durable_unix_s = wall()
        self._current_step = current_step

    @property
    def steps_at_risk(self) -> int:
        """Iterations that would be lost if the run were killed now."""
        return max(0, self._current_step() - (self._durable_step or 0))

    def why_held_back(self) -> str:
        """Why no periodic checkpoint should be tried now; "" if one may be."""
        pause_s = self._pause_s()
        num = self._backoff.num_in_row
        return f"{num} failed in a row; the next try is in {pause_s:.0f} s" if pause_s else ""

    def durable(self, step: int) -> None:
        """``step`` is known to be durable from now on."""
        self._durable_step, self._durable_unix_s = step, self._wall()

    def failed(self, step: int, error: CheckFreqError) -> None:
        """A checkpoint, or this rank's part of it, failed."""
        self._backoff.failed(self._clock())
        notice = self._notice(step, error)
        tolerated = self._tolerate_failures
        logger.error(
            "checkpoint of step %d failed (%d in a row%s). %s: %s",
            step,
            notice.num_in_row,
            "" if tolerated is None else f", {tolerated} tolerated",
            self._at_risk(notice),
            error,
        )
        self._tell(notice)

    def succeeded(self, step: int) -> None:
        """A checkpoint, or this rank's part of it, is durable; reported after a failure."""
        num_failed, since_s = self._backoff.num_in_row, self._durable_unix_s
        self._backoff.succeeded()  # resets the number in a row, which the notice then has as 0
        if not num_failed:
            return
        logger.warning(
            "checkpoints are durable again: step %d, after %d failed in %.0f s",
            step,
            num_failed,
            self._wall() - since_s,
        )
        self._tell(self._notice(step, None))

    def _pause_s(self) -> float:
        return self._backoff.left_s(self._clock()) if self._tolerate_failures is None else 0.0

    def _notice(self, step: int, error: CheckFreqError | None) -> FailureNotice:
        return FailureNotice(
            step=step,
            error=error,
            num_in_row=self._backoff.num_in_row,
            durable_step=self._durable_step,
            durable_unix_s=self._durable_unix_s,
            steps_at_risk=self.steps_at_risk,
            retry_in_s=self._pause_s(),
        )

    def _at_risk(self, notice: FailureNotice) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(notice.durable_unix_s))
        ago_s = self._wall() - notice.durable_unix_s
        what = "No checkpoint of this run"
        if notice.durable_step is not None:
            what = f"No checkpoint newer than step {notice.durable_step}"
        retry = f"in {notice.retry_in_s:.0f} s" if notice.retry_in_s else "at the next interval"
        return (
            f"{what} has become durable for {ago_s:.0f} s (since {since}). A kill now would lose "
            f"{notice.steps_at_risk} iteration(s). Training goes on; the next try is {retry}"
        )

    def _tell(self, notice: FailureNotice) -> None:
        if self._on_failure is None:
            return
        try:
            self._on_failure(notice)
        except Exception:  # a broken alert must not end training
            logger.exception("CFConfig.on_failure raised; training goes on")
