"""The end of a SLURM job: its time limit, or a newer start of it.

``SLURM_JOB_END_TIME`` is the end as it was when the job started; newer versions set it. ``squeue``
tells the time left, and so also that the limit was changed. It asks the controller, which all jobs
of a cluster share: only rank 0's worker does, once a minute, and every 15 s in the last minutes.
Other ranks do not look at the environment either: it keeps the old limit.

A node that the controller has lost may go on training while SLURM starts the job again elsewhere.
Such a run holds the directory that the newer one waits for, so it ends as soon as it hears of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from checkfreq.notices.command import run_command
from checkfreq.notices.source import CLOCK, Clock, EndsAt, NoAnswerError

_ASK_S = 60.0
_ASK_OFTEN_S = 15.0
#: An answer usually takes 10 ms; a controller under load may take seconds.
_TIMEOUT_S = 10.0
#: After so many failures in a row it is asked only every ten minutes: there may be no squeue here.
_GIVE_UP = 5
_ASK_SELDOM_S = 600.0
_TIME_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")
_END_WHY = "the job's time limit"
#: What a run gets that lost its job: as long as SLURM leaves a process by default (``KillWait``).
_LOST_S = 30.0


class SlurmEndTime:
    """The end of the job in ``environ``."""

    name = "slurm"

    def __init__(self, environ: Mapping[str, str], *, clock: Clock = CLOCK) -> None:
        self._job = job_in(environ)
        self._environ = environ
        self._clock = clock
        self._num_failed = 0
        self._ends: EndsAt | None = None
        if (at_unix_s := _unix_s(environ.get("SLURM_JOB_END_TIME", ""))) is not None:
            self._ends = EndsAt(self.name, at_unix_s, _END_WHY)

    @property
    def pause_s(self) -> float:
        """See NoticeSource."""
        if not self._job:
            return math.inf
        if self._num_failed >= _GIVE_UP:
            return _ASK_SELDOM_S
        if self._ends is None or self._ends.at_unix_s is None:
            return _ASK_S
        left_s = self._ends.at_unix_s - self._clock.unix_s()
        return min(_ASK_S, max(_ASK_OFTEN_S, left_s / 10))

    def poll(self) -> EndsAt | None:
        """See NoticeSource."""
        if self._job:
            self._ask()
        return self._ends

    def _ask(self) -> None:
        """Ask squeue; what it knows beats the environment, which cannot change."""
        done = run_command(question(self._job), timeout_s=_TIMEOUT_S)
        told = told_by(done.out) if done.succeeded else None
        if told is None:
            self._num_failed += 1
            if self._ends is None:
                raise NoAnswerError(done.error or f"squeue said {done.out.strip()!r:.80}")
            return
        self._num_failed = 0
        left_s, why = told.left_s, _END_WHY
        if told.is_lost_to(self._environ):
            left_s, why = _LOST_S, f"SLURM has taken job {self._job} from this node"
            if self._ends is not None and self._ends.why == why:
                return  # the time since it was first heard of counts
        # squeue subtracts by this machine's clock, so that adding it again undoes a jump.
        at_unix_s = self._clock.unix_s() + left_s
        self._ends = None if left_s == math.inf else EndsAt(self.name, at_unix_s, why)


def job_in(environ: Mapping[str, str]) -> str:
    """The job that a process with ``environ`` belongs to; "" if to none.

    A task of an array is ``ARRAY_TASK``: the number of one task is that of the whole array too.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def num_restarts(environ: Mapping[str, str]) -> int:
    """How often the job that has ``environ`` was started again."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


@dataclass(frozen=True, slots=True)
class Told:
    """What squeue says of a job: seconds left, how often it was started again, its state.

    ``left_s`` is infinite without a limit.
    """

    left_s: float
    num_restarts: int
    state: str

    def is_lost_to(self, environ: Mapping[str, str]) -> bool:
        """Whether the start of the job that has ``environ`` is over for SLURM.

        There is a newer one, or will be; or the node failed, and there will be none.
        """
        return self.num_restarts > num_restarts(environ) or self.state == "NODE_FAIL"


def question(job: str) -> tuple[str, ...]:
    """The command that asks for a job, also for one that has just ended."""
    return ("squeue", "-h", "-t", "all", "-j", job, "-O", "TimeLeft,RestartCnt,State")


def ask(job: str, *, timeout_s: float) -> Told | None:
    """What squeue says of a job; None without an answer."""
    done = run_command(question(job), timeout_s=timeout_s)
    return told_by(done.out) if done.succeeded else None


def told_by(text: str) -> Told | None:
    """squeue's answer; None if there is none.

    A heterogeneous job has a line for each component, of which the first to end counts, and a
    federation adds a headline.
    """
    found: list[Told] = []
    for line in text.splitlines():
        left, restarts, state, *_ = (*line.split(), "0", "", "")
        if (left_s := time_left_s(left)) is not None:
            found.append(Told(left_s, int(restarts), state))
    return min(found, key=lambda told: told.left_s, default=None)


def time_left_s(text: str) -> float | None:
    """Seconds in squeue's ``%L``: ``days-hours:minutes:seconds`` without leading zeros.

    Infinite for a job without a limit, 0 for one that is past it, None for anything else.
    """
    match text.strip():
        case "UNLIMITED" | "NOT_SET":
            return math.inf
        case "INVALID":
            return 0.0
        case other:
            found = _TIME_LEFT.fullmatch(other)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _unix_s(text: str) -> float | None:
    """A time in seconds since 1970; None for anything else, 0 included: no limit."""
    return float(text) if text.isdecimal() and int(text) > 0 else None
