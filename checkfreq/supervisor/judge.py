"""Whether the script is started again, and when."""

from __future__ import annotations

from checkfreq.policy.backoff import Backoff
from checkfreq.supervisor.processes import signal_name
from checkfreq.supervisor.progress import Progress
from checkfreq.supervisor.report import PastRun


class Judge:
    """``max_restarts`` of None: as many as make progress."""

    def __init__(self, *, max_restarts: int | None) -> None:
        self._max_restarts = max_restarts
        self._progress = Progress()
        self._backoff = Backoff()
        self._num_outages = 0

    def why_over(self, past: PastRun, *, told_by: int | None, passed: set[int]) -> str | None:
        """Why ``past`` was the last run; None if there is to be another."""
        if told_by is not None:
            return f"told to stop by {signal_name(told_by)}: {past}"
        if past.has_stopped:
            return f"stopped: {past}. The same command goes on from there"
        if past.ended.code == 0:
            return f"finished: {past}"
        if (number := past.ended.signal_number) in passed and number is not None:
            return f"ended by the {signal_name(number)} that was passed on: {past}"
        return self._why_in_vain(past)

    def _why_in_vain(self, past: PastRun) -> str | None:
        if past.is_outage:  # which ends some time: neither counted nor given up
            self._num_outages += 1
            self._backoff.failed(past.ended_s)
            return None
        got_on = self._progress.run_ended(past.records, lived_s=past.lived_s)
        if self._max_restarts is not None and past.number - self._num_outages > self._max_restarts:
            return f"giving up after {_counted(self._max_restarts, 'restart')}: {past}"
        if self._progress.is_hopeless:
            in_vain = _counted(self._progress.num_in_vain, "run")
            return f"giving up after {in_vain} in a row without progress: {past}"
        if got_on:
            self._backoff.succeeded()
        self._backoff.failed(past.ended_s)
        return None

    def pause_s(self, now_s: float) -> float:
        """Seconds until the next start is due."""
        return self._backoff.left_s(now_s)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
