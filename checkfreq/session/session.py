"""What a run is made of, and the acts that its boundaries, its restore and its end share."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import replace
from functools import partial

from checkfreq.console import say
from checkfreq.errors import CheckFreqError, ConfigError, StateError
from checkfreq.forks import Home
from checkfreq.mirror.reader import MirrorReader
from checkfreq.mirror.settings import Mirror, is_url
from checkfreq.pacing.profile_cache import ProfileCache
from checkfreq.pacing.profiler import Profiler
from checkfreq.pacing.trace import NAME as TRACE
from checkfreq.pacing.trace import TraceLog
from checkfreq.persist.attempts import Marks
from checkfreq.policy.retention import Retention
from checkfreq.ranks.coordinator import Coordinator, SingleRank
from checkfreq.ranks.meetings import Meetings, ranks_together
from checkfreq.ranks.merging import agreeing
from checkfreq.ranks.multi_rank import MultiRank
from checkfreq.ranks.rendezvous import MAKING
from checkfreq.ranks.roles import agree_on_role, agree_on_settings
from checkfreq.run.notices import LastMoment
from checkfreq.run.pipeline import Pipeline
from checkfreq.session.arguments import Arguments, Checked
from checkfreq.session.progress import Progress
from checkfreq.session.staging import staged
from checkfreq.session.unseen import Unseen
from checkfreq.session.untracked import Untracked
from checkfreq.snapshot.gate import UpdateGate
from checkfreq.state.positions import Positions
from checkfreq.state.sharers import warn_of_sharers
from checkfreq.store.fileops import LocalFileOps
from checkfreq.store.source import CheckpointSource
from checkfreq.supervisor.reporter import reporter_for
from checkfreq.types import Objective, Role

logger = logging.getLogger("checkfreq.manager")


class Session:
    """The parts of one run, made in the order in which they depend on each other.

    With several ranks every constructor call is a meeting: what fails on one raises on all.
    """

    def __init__(self, arguments: Arguments) -> None:
        meetings = ranks_together(timeout_s=arguments.config.rank_timeout_s)
        is_staged = is_url(str(arguments.chk_dir))
        arguments, checked, role = _checked(arguments, meetings)
        config = arguments.config
        #: The directory may be of this machine alone: the next run has what was uploaded.
        self.restores_from_mirror = is_staged or not role.shares_all
        self.arguments = arguments
        self.config = config
        self.chk = arguments.chk
        self.chk_dir = checked.chk_dir
        self.cadence = checked.cadence
        self.notice = checked.notice
        self.last_moment = LastMoment(
            checked.notice,
            config=config,
            uploads_last=self.restores_from_mirror or not config.requeue,
        )
        self.role = role
        self.home = Home(f"the manager of {checked.chk_dir}")
        self.progress = Progress(may_start=arguments.fresh)
        self.positions = Positions(role)
        self.profiler = _profiler(arguments, checked, role)
        self.pipeline = Pipeline(
            checked.chk_dir,
            arguments.chk,
            self.positions,
            config=config,
            retention=arguments.retention,
            tolerate_failures=arguments.tolerate_failures,
            profiler=self.profiler,
            last_moment=self.last_moment,
            current_step=lambda: self.progress.global_step,
            role=role,
        )
        self.persistence = self.pipeline.persistence
        self.coordinator = self._coordinator(meetings)
        if arguments.fresh:
            self.persistence.start_over()
        self._start()
        self.reporter = reporter_for(checked.chk_dir, rank=role.rank)
        self.untracked = Untracked(
            arguments.chk, evidence=self.pipeline.evidence, gradients=self.pipeline.gradients
        )
        self.unseen = Unseen(arguments.chk)
        self.gate = UpdateGate(self.untracked.is_update, fence=self.pipeline.fence, home=self.home)

    def _start(self) -> None:
        """Take over what a killed run left in memory, or start a worker."""
        inherits = not self.arguments.fresh and self.config.keep_in_memory_s > 0
        if inherits:
            self.coordinator.each(MAKING, self.pipeline.inheritance.ask)
        self.coordinator.each(MAKING, partial(self.pipeline.start, inherits=inherits))

    def _coordinator(self, meetings: Meetings | None) -> Coordinator:
        if meetings is None:
            return SingleRank(self.pipeline, self.last_moment)
        return MultiRank(
            meetings, self.role, self.pipeline, self.profiler, self.last_moment, config=self.config
        )

    @property
    def wants_epoch_ends(self) -> bool:
        """Whether the retention keeps checkpoints at the ends of epochs."""
        policy = self.arguments.retention
        return isinstance(policy, Retention) and policy.wants_epoch_ends()

    # ---- what must hold before an act

    def require_open(self) -> None:
        """StateError once the manager was closed."""
        if self.progress.is_closed:
            raise StateError(f"the manager of {self.chk_dir} is closed")
        self.require_whole()

    def require_whole(self) -> None:
        """StateError after a restore that left parts of a checkpoint in live objects."""
        if self.progress.spoiled:
            raise StateError(
                f"restore() failed, and {self.progress.spoiled}: they can be neither trained nor "
                "checkpointed. Start a new process, and restore there"
            )

    def begin(self, *, iterating: bool = True) -> None:
        """First use: own the directory, and refuse to run over somebody's checkpoints."""
        self.require_open()
        progress = self.progress
        if not progress.is_open:
            self.coordinator.open()
            self.coordinator.each("the first step()", self._refuse_to_start_over)
            progress.is_open = True
            warn_of_sharers(self.chk)
            if progress.restored_step is None:
                self.reporter.begin(progress.global_step, restored=False)
            self._record_beginning()
        if iterating:
            progress.has_iterated, progress.apply_last = True, None

    def _record_beginning(self) -> None:
        """For readers of events: one line for each process that trains."""
        arguments, cadence = self.arguments, self.cadence
        # An interval that the user chose keeps to no bound, and goodput exceeds it on purpose.
        is_bound = cadence is None and self.config.objective is Objective.BOUND
        self.persistence.record(
            "began",
            self.progress.global_step,
            pid=os.getpid(),
            host=socket.gethostname(),
            world=self.role.world,
            mode=arguments.mode.value,
            max_overhead=arguments.max_overhead if is_bound else None,
            interval_steps=None if cadence is None else cadence.interval_steps,
            fresh=arguments.fresh or None,
            running_s=self.profiler.failures.running_s or None,
            **self.profiler.failures.facts(),
        )

    def _refuse_to_start_over(self) -> None:
        if self.progress.may_start:
            return
        for name, steps in ((str(self.chk_dir), self.persistence.steps()), self._in_mirror()):
            if steps:
                raise ConfigError(
                    f"{name} holds checkpoints (newest: step {steps[-1]}) and restore() "
                    "was not called. Call restore() before training, pass fresh=True to start "
                    "over, or use another directory"
                )

    def _in_mirror(self) -> tuple[str, list[int]]:
        """The mirror's URL and steps; only the rank that leads asks."""
        if (remote := self.remote()) is None or not self.role.leads:
            return "", []
        return remote.name, remote.steps()

    def remote(self) -> CheckpointSource | None:
        """The mirror, to read from; None without one."""
        mirror = Mirror.of(self.config.mirror)
        if mirror is None:
            return None
        return MirrorReader(mirror if self.role.shares_all else mirror.for_node(self.role.leader))

    def steps(self) -> list[int]:
        """Every step that is in the directory or in the mirror, ascending."""
        remote = self.remote()
        return sorted({*self.persistence.steps(), *(remote.steps() if remote else ())})

    def why_no_boundary(self) -> str | None:
        """What happened since the last boundary; None at one."""
        if not self.gate.at_boundary:
            return "an update was attempted since the last one"
        if (name := self.positions.using_batch()) is not None:
            return f"iterator {name!r} handed out a batch since the last one"
        return None

    # ---- a checkpoint that has to be durable

    def make_durable(self, reason: str, marks: Marks) -> None:
        """Have this boundary's checkpoint on disk; retries once, then raises what failed."""
        error = self._try_to_make_durable(reason, marks)
        if error is not None and (error := self._try_to_make_durable(reason, marks)) is not None:
            raise error

    def _try_to_make_durable(self, reason: str, marks: Marks) -> CheckFreqError | None:
        step = self.progress.global_step
        attempt = self.coordinator.require(step, reason, marks)
        return self.coordinator.outcome(step, attempt)

    # ---- what is said

    def say_news(self) -> None:
        """Log what was heard about the end of the run since the last call."""
        for text in self.last_moment.board.take_news():
            self.say("%s", text)
            self.persistence.record("notice", self.progress.global_step, text=text)

    def say(self, message: str, *args: object, is_vital: bool = False) -> None:
        """Log at INFO, on rank 0 also shown to users who never configured logging."""
        say(logger, message, *args, is_shown=self.role.rank == 0, is_vital=is_vital)


def _checked(arguments: Arguments, meetings: Meetings | None) -> tuple[Arguments, Checked, Role]:
    """Check the arguments, on all ranks before any goes on, and agree on who writes what."""
    if meetings is None:
        arguments = _staged(arguments)
        return arguments, arguments.checked(), Role()
    results: list[tuple[Arguments, Checked]] = []

    def check() -> None:
        local = _staged(arguments)
        results.append((local, local.checked()))

    meetings.act(MAKING, check, merge=agreeing())
    agree_on_settings(meetings, arguments.common())
    local, checked = results[0]
    return local, checked, agree_on_role(meetings, checked.chk_dir, config=local.config)


def _staged(arguments: Arguments) -> Arguments:
    chk_dir, config = staged(arguments.chk_dir, arguments.config)
    return replace(arguments, chk_dir=chk_dir, config=config)


def _profiler(arguments: Arguments, checked: Checked, role: Role) -> Profiler:
    """Rank 0 decides for all, from costs that only its profile keeps."""
    cadence = checked.cadence
    decides = cadence is None and role.rank == 0
    return Profiler(
        checked.policy,
        dynamic=arguments.dynamic,
        interval_steps=None if cadence is None else cadence.interval_steps,
        summary_writer=arguments.config.summary_writer if role.rank == 0 else None,
        cache=ProfileCache(checked.chk_dir / "profile.json") if decides else None,
        trace=_trace(arguments, checked, role),
    )


def _trace(arguments: Arguments, checked: Checked, role: Role) -> TraceLog | None:
    if not arguments.config.record_trace or role.rank != 0:
        return None
    return TraceLog(checked.chk_dir / TRACE, LocalFileOps(checked.chk_dir, direct=False))
