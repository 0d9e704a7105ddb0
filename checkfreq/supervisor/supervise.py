"""The loop: start the script, wait, judge how it ended, pause, start it again.

One thread, which waits for signals alone: the end of a child is one of them. What judges the end
of a run is imported while the first one starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from checkfreq.supervisor.board import VARIABLE, Board
from checkfreq.supervisor.command import NotPythonError, python_command
from checkfreq.supervisor.processes import (
    NOT_FOUND,
    NOT_RUN,
    Ended,
    become_subreaper,
    signal_name,
)
from checkfreq.supervisor.script import Script
from checkfreq.supervisor.signals import Signals
from checkfreq.supervisor.standby import Standby

if TYPE_CHECKING:
    from checkfreq.supervisor.report import PastRun

#: Every wait has an end; what is waited for comes as a signal.
_LONG_S = 3600.0
_LOOK_S = 0.1
#: How long a script may take to pass its first boundary before a standby is started beside it.
_STARTING_S = 10.0
#: A worker that writes or uploads for longer than this, after the last run, is not waited for.
_PERSIST_S = 300.0


class Supervisor:
    """Runs one command until it is done, or not worth another try.

    ``say`` is given one line at a time. ``max_restarts`` of None: as many as make progress.
    ``standby``: the modules that a standby imports besides the usual ones; None for no standby.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        max_restarts: int | None = None,
        standby: Sequence[str] | None = None,
    ) -> None:
        self._command = command
        self._environ = environ
        self._say = say
        self._max_restarts = max_restarts
        self._signals = Signals()
        self._standby = None if standby is None else self._make_standby(standby)
        self._script = Script(command, signals=self._signals, standby=self._standby)
        self._board = Board()
        #: A run whose restart has not been told of: what was lost is known once training goes on.
        self._untold: PastRun | None = None

    def run(self) -> int:
        """Returns an exit status: that of the script's last run, as a shell would say it."""
        become_subreaper()
        with self._signals:
            try:
                return self._run()
            except OSError as error:
                if error.filename != self._command[0]:
                    raise
                self._say(f"cannot run {self._command[0]!r}: {error.strerror}")
                return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN

    def _run(self) -> int:
        self._start()
        from checkfreq.supervisor.judge import Judge
        from checkfreq.supervisor.progress import Workers

        self._workers = Workers()
        judge = Judge(max_restarts=self._max_restarts)
        number = 0
        while True:
            number += 1
            past = self._wait_for_end(number)
            self._workers.add(past.records)
            why = judge.why_over(past, told_by=self._script.told_by, passed=self._script.passed)
            if why is not None:
                return self._end(past, why)
            self._untold = past
            self._pause(past, judge.pause_s(time.monotonic()))
            if (told_by := self._script.told_by) is not None:
                name = signal_name(told_by)
                self._end(past, f"told to stop by {name} before the next start: {past}")
                return Ended(-told_by).status
            self._start()

    def _make_standby(self, imports: Sequence[str]) -> Standby | None:
        try:
            command = python_command(self._command)
        except NotPythonError as error:
            self._say(f"no standby: {error}; expected python SCRIPT ... or python -m MODULE ...")
            return None
        return Standby(
            command,
            self._command,
            environ=self._environ,
            mask=lambda: self._signals.mask_before,
            imports=imports,
            say=self._say,
        )

    # ---- one run

    def _start(self) -> None:
        self._board.close()
        self._board = Board()
        self._began_s = time.monotonic()
        self._script.start({**self._environ, VARIABLE: self._board.address})

    def _wait_for_end(self, number: int) -> PastRun:
        from checkfreq.supervisor.report import PastRun

        while (ended := self._script.ended) is None:
            waits = self._untold is not None or self._wants_standby()
            timeout_s = _LOOK_S if waits else _LONG_S
            self._script.wait(timeout_s=timeout_s, until=lambda: self._script.ended is not None)
            self._tell_of_restart(at_once=self._script.ended is not None)
            self._prepare_standby()
        records = self._board.records()
        return PastRun(number, ended, self._began_s, time.monotonic(), records)

    def _tell_of_restart(self, *, at_once: bool) -> None:
        """Say what a restart cost, once that is known."""
        from checkfreq.supervisor.report import restart_line, went_on

        if self._untold is None:
            return
        records = self._board.records()
        if at_once or not self._untold.records or went_on(records) is not None:
            self._say(restart_line(self._untold, records))
            self._untold = None

    def _wants_standby(self) -> bool:
        return self._standby is not None and self._standby.is_missing

    def _prepare_standby(self) -> None:
        """Start a standby, where there is none, once the script has the processors no more."""
        from checkfreq.supervisor.report import went_on

        if self._standby is None or not self._standby.is_missing:
            return
        is_late = time.monotonic() >= self._began_s + _STARTING_S
        if is_late or went_on(self._board.records()) is not None:
            self._standby.prepare()

    def _pause(self, past: PastRun, pause_s: float) -> None:
        if pause_s > 0.0:
            self._say(f"{past}; starting it again in {pause_s:.0f} s")
        self._script.wait(timeout_s=pause_s, until=lambda: self._script.told_by is not None)

    # ---- the end

    def _end(self, past: PastRun, why: str) -> int:
        """Wait for workers that outlived the script: PID 1's end, or a job's, would end them."""
        script, end_s = self._script, time.monotonic() + _PERSIST_S
        if self._standby is not None:
            self._standby.kill()
        if written := self._workers.busy_in():
            self._say(f"waiting for what is still being written to {', '.join(written)}")
            script.passed.clear()
        while written and not script.passed and time.monotonic() < end_s:
            script.wait(timeout_s=_LOOK_S, until=lambda: bool(script.passed))
            written = self._workers.busy_in()
        if written:
            self._say(f"not waiting any longer for what is written to {', '.join(written)}")
        self._say(why)
        return past.status
