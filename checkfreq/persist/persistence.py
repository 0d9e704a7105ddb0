"""Phase two as the manager sees it: snapshots go in, durable checkpoints and failures come out.

Owns the worker's client, the attempts in flight, the catalog of the directory, and the run's
log. A dead or stuck worker is replaced, and every attempt it held is handed over again; an
attempt with which two workers died has failed. Belongs to the training thread, except
``hand_over``.
"""

from __future__ import annotations

import logging
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from checkfreq import __version__
from checkfreq.config import CFConfig
from checkfreq.errors import CorruptCheckpointError, WorkerDiedError
from checkfreq.events import Event, EventLog
from checkfreq.persist import protocol as p
from checkfreq.persist.alarm import Alarm
from checkfreq.persist.attempts import Attempt, AttemptBook, Marks
from checkfreq.persist.catalog import BEFORE_EVERY_STEP, Catalog
from checkfreq.persist.client import WorkerClient
from checkfreq.persist.handover import Offer
from checkfreq.persist.listing import Record, marked
from checkfreq.persist.lock import holder_of
from checkfreq.persist.mirrored import MirrorView, OnUpload
from checkfreq.persist.run_log import RunLog
from checkfreq.policy.backoff import Backoff
from checkfreq.policy.best import BestName, best_step, require_best
from checkfreq.policy.lifecycle import AttemptState
from checkfreq.policy.retention import Retention, RetentionPolicy
from checkfreq.policy.retention_info import CheckpointInfo
from checkfreq.snapshot.arena import Slot
from checkfreq.store.marks import StepMark
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore
from checkfreq.types import FileSpec, Json, Role, size_text

logger = logging.getLogger(__name__)

#: The longest pause between workers that could not use the directory. Starting one takes time
#: from training, and a directory that is back should not stay unused for minutes.
_LONGEST_REST_S = 10.0
#: How often to look for the end of a copy, which no reply of the worker announces.
_LOOK_FOR_COPY_S = 0.05
#: A worker that is to be killed at a deadline ends its upload this much earlier.
_END_UPLOAD_S = 5.0
#: Before a known end it ends it this much earlier, and one that heard of a deadline too late is
#: killed so: a request that hangs holds it for a second more, and then its trainer has to end.
_EXIT_S = 3.0


class Persistence:
    """One directory, its worker, and the attempts of this run.

    ``release`` takes a slot back once its attempt has ended. ``on_ended`` is called with every
    attempt that ended; what it returns is noted with a commit. ``current_step`` tells how many
    boundaries training has passed. ``on_notice`` is called with what is heard about the run's end.
    """

    def __init__(
        self,
        chk_dir: Path,
        *,
        config: CFConfig,
        retention: RetentionPolicy,
        tolerate_failures: int | None,
        release: Callable[[Slot], None],
        on_ended: Callable[[Attempt], Mapping[str, object]] = lambda attempt: {},
        current_step: Callable[[], int] = lambda: 0,
        on_upload: OnUpload = lambda began_s, ended_s: None,
        role: Role = Role(),
        on_notice: Callable[[p.Notice], object] = lambda notice: None,
    ) -> None:
        self._chk_dir = chk_dir
        self._store = CheckpointStore(chk_dir)
        self._client = WorkerClient(chk_dir, config=config, role=role, on_notice=on_notice)
        self._book = AttemptBook(
            tolerate_failures=tolerate_failures, release=release, replaces=not role.shares_all
        )
        self._alarm = Alarm(
            tolerate_failures=tolerate_failures,
            on_failure=config.on_failure,
            current_step=current_step,
        )
        self._catalog = Catalog(
            self._store,
            retention,
            is_shared=role.shares_all,
            agent_copies_within_s=config.agent_copies_within_s,
        )
        self._retention = retention
        self._told_cost = False
        self._config = config
        self._role = role
        self._on_ended = on_ended
        self._current_step = current_step
        events = EventLog(
            chk_dir / "events.jsonl",
            self._store.ops if role.leads else None,
            max_bytes=config.max_events_bytes,
        )
        self._log = RunLog(events, is_rank_0=role.rank == 0)
        self._mirror = MirrorView(
            self._client.mirror, retention, record=self.record, on_upload=on_upload
        )
        #: The first commit sets aside the checkpoints of later steps than this one.
        self._supersede_after: int | None = None
        self._num_replaced = 0
        self._handed_twice: set[str] = set()
        self._restarts = Backoff(longest_s=_LONGEST_REST_S)
        #: Whether another run may still have the directory, and commit to it before it is open.
        self.follows_another = True

    # ---- opening

    def start(self) -> None:
        """Start the worker, without waiting for it."""
        self.follows_another = holder_of(self._chk_dir) is not None
        self._client.start()

    def adopt(self, offer: Offer, slots: Sequence[Slot]) -> None:
        """In place of ``start``: take over a killed run's worker and what it has in its hands.

        ``slots`` are those of the offer. Raises HandoverError if the worker is gone, and
        CorruptCheckpointError if it says of a snapshot in flight what cannot be.
        """
        in_flight = offer.body.in_flight
        by_index = {slot.index: slot for slot in slots}
        attempts = [
            Attempt.inherited(one.request(rank=self._role.rank), by_index[one.slot])
            for one in in_flight
        ]
        self._client.adopt(offer, slots, in_flight)
        for attempt in attempts:
            self._book.add(attempt)

    @property
    def open_timeout_s(self) -> float:
        """How long opening may take."""
        return self._client.open_timeout_s

    def open(self, *, check: Callable[[int], Record] | None = None) -> None:
        """Wait until the worker holds the directory, then list what is in it; idempotent.

        ``check`` returns a step's record, and raises if it cannot be read: a caller that has parsed
        some already passes its own.
        """
        self._open(self._client.wait_opened, check)

    def try_open(self, timeout_s: float, *, check: Callable[[int], Record] | None = None) -> bool:
        """``open`` that waits for at most ``timeout_s``; returns whether the directory is open."""
        self._open(lambda: self._client.poll_opened(timeout_s=timeout_s), check)
        return self._catalog.is_loaded

    def _open(self, wait: Callable[[], object], check: Callable[[int], Record] | None) -> None:
        if self._catalog.is_loaded:
            return
        try:
            wait()
        except WorkerDiedError as error:
            self._worker_died(error)
            wait()
        if self._client.has_opened:
            self._catalog.load(check or self._store.manifest)

    def start_over(self) -> None:
        """The run begins without a checkpoint: the first commit sets aside all that are there."""
        self._supersede_after = BEFORE_EVERY_STEP

    def continue_from(
        self, step: int, *, attempt: str, was_chosen: bool, is_durable: bool = True
    ) -> None:
        """``step``, as ``attempt`` wrote it, was restored: it is the run's newest.

        ``was_chosen``: the user named the step. Later ones are set aside by the first commit.
        ``is_durable``: False for a snapshot of which there was no checkpoint yet.
        """
        self._book.disown_later_than(step)
        if is_durable:
            self._book.continue_from(step, attempt)
            self._alarm.durable(step)
        else:
            self._continue_above(step)
        # With a directory per node, some may hold later steps that not all of them have.
        sets_aside = was_chosen or not self._role.shares_all
        self._supersede_after = step if sets_aside else None

    def _continue_above(self, step: int) -> None:
        older = max((there for there in self._store.steps() if there < step), default=None)
        self._book.continue_above(older)
        if older is not None:
            self._alarm.durable(older)

    # ---- slots

    def forget_slots(self) -> None:
        """See SlotListener."""
        self._client.forget_slots()

    def share_slot(self, slot: int, *, fd: int, num_bytes: int) -> None:
        """See SlotListener."""
        self._client.share_slot(slot, fd=fd, num_bytes=num_bytes)

    def lay_out_slot(self, slot: int, files: tuple[FileSpec, ...]) -> None:
        """See SlotListener."""
        self._client.lay_out_slot(slot, files)

    # ---- attempts

    def begin(self, attempt: Attempt) -> None:
        """A snapshot was begun: its attempt is in flight from now on."""
        self._book.add(attempt)

    def note_stall(self, stall_s: float) -> None:
        """A weight update waited for the copy of the newest attempt in flight."""
        for attempt in self._book.active[-1:]:
            attempt.stall_s += stall_s

    def hand_over(self, attempt: Attempt, objects: Json, own: Json = None) -> None:
        """Give a complete snapshot to the worker (called on the copy thread)."""
        self._client.submit(
            p.Persist(
                attempt=attempt.id,
                step=attempt.step,
                slot=attempt.slot.index,
                objects=objects,
                world=self._role.world,
                versions=_versions(),
                supersede_after=self._supersede_after,
                keep=attempt.marks.keep,
                metrics=attempt.marks.metrics,
                own=own,
                part_timeout_s=self._config.rank_timeout_s,
                at_epoch_end=attempt.at_epoch_end,
                contents=attempt.slot.contents,
            )
        )

    def reap(self, *, timeout_s: float = 0.0) -> None:
        """Process failed copies, replies, and the worker's death, if any.

        Waits at most ``timeout_s`` for the first reply.
        """
        for attempt in self._book.take_void():
            self._tell_failure(attempt)
            self._failed(attempt)
        if self._restarts.num_in_row and (rest_s := self._restarts.left_s(time.monotonic())) > 0:
            time.sleep(min(timeout_s, rest_s))  # no worker is running that could reply
            return
        try:
            while (reply := self._client.poll(timeout_s=timeout_s)) is not None:
                self._on_reply(reply)
                timeout_s = 0.0
        except WorkerDiedError as error:
            self._worker_died(error)
        # After the replies: an attempt may look late only because its reply was not read yet.
        self._check_deadlines()

    def wait_until(
        self, condition: Callable[[], bool], *, timeout_s: float, look_every_s: float = 1.0
    ) -> bool:
        """Reap until ``condition()`` holds; False at the deadline.

        ``look_every_s``: how often to check a condition that no reply of the worker announces.
        """
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            pause_s = _LOOK_FOR_COPY_S if self._is_copying() else look_every_s
            self.reap(timeout_s=min(left_s, pause_s))
        return True

    def _is_copying(self) -> bool:
        return any(a.state is AttemptState.COPYING for a in self._book.active)

    def add_marks(self, step: int, marks: Marks) -> None:
        """Pin, or add metrics to, a step that is in flight or committed."""
        attempt = self._book.find(step)
        if attempt is not None:
            attempt.mark(marks)
        else:
            self._send_marks(step, marks)

    def note_finished(self, step: int, *, finished: bool) -> None:
        """Ask the worker to record whether the run is finished with ``step``."""
        if self._role.leads:
            self._client.ask(p.AddMark(step, False, {}, finished))
            self.record("finished" if finished else "reopened", step)

    def confirm(self, step: int) -> None:
        """The ranks agreed that ``step`` is committed in every directory of the run.

        A member learns here that the checkpoint is durable: it wrote only a part. The leader of
        one of several directories may remove older checkpoints from now on.
        """
        if not self._role.leads:
            if self._book.confirm(step):
                self._alarm.durable(step)
        elif not self._role.shares_all and self._catalog.confirm(step):
            if not self._store.ever_held_common():
                self._client.ask(p.Confirm(step))
            self._prune()

    def quarantine(self, step: int, reason: CorruptCheckpointError) -> None:
        """Ask the worker to set a damaged step aside; on a member, only record the event."""
        if self._role.leads:
            self._client.ask(p.Quarantine(step, str(reason)))
        self.record("quarantined", step, reason=str(reason))
        self._catalog.remove(step)

    def discard_partial(
        self, rejected: Mapping[int, CorruptCheckpointError], *, older_than: int
    ) -> tuple[int, ...]:
        """Ask the worker to remove what was copied here in part; returns the steps.

        They are those of ``rejected``, and of all ``older_than``, of which something is missing.
        For a directory that an agent copies file by file.
        """
        if not self._role.leads:
            return ()
        steps = self._catalog.request_partial(rejected, older_than=older_than)
        if steps:
            self._client.ask(p.Prune(steps))
        return steps

    def close(
        self,
        *,
        timeout_s: float,
        left_s: Callable[[], float] = lambda: math.inf,
        upload_left_s: float = math.inf,
    ) -> None:
        """Let the worker finish, upload the last checkpoint and exit; kill it after ``timeout_s``.

        Or earlier, once ``left_s()`` is 0. The upload takes at most ``Mirror.wait_on_close_s`` and
        ``upload_left_s``, and ends in time for the rest.
        """
        began_s = time.monotonic()
        upload_for_s = max(0.0, min(upload_left_s - _EXIT_S, timeout_s - _END_UPLOAD_S))
        upload_for_s = min(self._mirror.wait_on_close_s, upload_for_s)
        was_open = self._client.has_opened
        uploads_only = upload_for_s > 0.0 and not self.num_in_flight
        spare_s = _EXIT_S if uploads_only else 0.0
        if (coming := self._catalog.newest) is not None:  # afterwards nobody could ask for it
            doomed = self._mirror.to_remove(coming=coming)
            self._client.prune_mirror(doomed, once=coming.step)
        has_ended = self._client.close(
            timeout_s=timeout_s,
            upload_for_s=upload_for_s,
            left_s=lambda: left_s() - spare_s,
        )
        if not has_ended and not uploads_only:  # else `closed` says what the mirror has not got
            logger.error(
                "the persist worker did not finish within %.0f s and was killed",
                time.monotonic() - began_s,
            )
        for reply in self._client.final_reports:
            self._mirror.take(reply.report)
        newest = self._book.last_durable_step
        if was_open and newest is not None and self._catalog.holds(newest):
            self._mirror.closed(newest)  # else it was restored from there

    def record(self, kind: str, step: int, **data: object) -> None:
        """Record an event: as ``last_event`` and in events.jsonl."""
        self._log.record(kind, step, **data)

    # ---- state, for the manager and the pipeline

    @property
    def num_in_flight(self) -> int:
        """Attempts that have not ended."""
        return self._book.num_active

    def has_inherited(self, *, newer_than: int) -> bool:
        """Whether a snapshot of the run before is in flight, of a later step."""
        return any(a.is_inherited and a.step > newer_than for a in self._book.active)

    def started_s(self) -> tuple[float, ...]:
        """When the attempts in flight were begun, oldest first, by ``time.perf_counter``."""
        return tuple(attempt.started_s for attempt in self._book.active)

    @property
    def has_unanswered_requests(self) -> bool:
        """Whether the worker was asked for a removal or a mark, and has not answered."""
        return self._client.has_unanswered_requests

    def in_flight(self, step: int) -> Attempt | None:
        """The attempt in flight for ``step``; None if there is none."""
        return self._book.find(step)

    def is_written(self, step: int) -> bool:
        """Whether ``step``, or this rank's part of it, is durable or in flight."""
        return self._book.is_written(step)

    def durable_attempts(self) -> list[tuple[int, str]]:
        """The newest durable checkpoints, oldest first: step and attempt."""
        return list(self._book.durable)

    def steps(self) -> list[int]:
        """The committed steps in the directory, ascending."""
        return self._store.steps()

    def best_step(self, name: BestName, *, remote: CheckpointSource | None = None) -> int | None:
        """The best committed step here or in ``remote``; None if none has a finite value."""
        found = self._marked(remote)
        return best_step(found, name.metric, highest=self._is_highest(name))

    def require_best(self, name: BestName, *, remote: CheckpointSource | None = None) -> int:
        """`best_step`; NoCheckpointError, listing the metrics there are, if there is none."""
        where = " and ".join(source.name for source in (self._store, remote) if source)
        found = self._marked(remote)
        return require_best(found, name, highest=self._is_highest(name), where=where)

    def _marked(self, remote: CheckpointSource | None) -> list[CheckpointInfo]:
        """The steps that have marks; of one that is in both places, the directory's."""
        found = {} if remote is None else {info.step: info for info in marked(remote)}
        here = {info.step: info for info in marked(self._store)}
        return [info for _, info in sorted({**found, **here}.items())]

    def _is_highest(self, name: BestName) -> bool:
        if name.highest is not None:
            return name.highest
        policy = self._retention
        return isinstance(policy, Retention) and policy.prefers_highest(name.metric)

    def is_finished(self, step: int) -> bool:
        """Whether the directory records that the run is finished with ``step``."""
        return self._store.marks().get(step, StepMark()).finished

    def upload_s(self) -> float:
        """Seconds from durable to uploaded, as ``close`` counts them; 0.0 if nothing is known."""
        upload_s = self._mirror.upload_s
        return upload_s + _END_UPLOAD_S if upload_s else 0.0

    def why_held_back(self) -> str:
        """Why no periodic checkpoint should be tried now, after failures; "" if one may be."""
        return self._alarm.why_held_back()

    def raise_if_intolerable(self) -> None:
        """Raise the latest failure if more failed in a row than the user tolerates."""
        self._book.raise_if_intolerable()

    def raise_if_last_failed(self) -> None:
        """Raise the failure of the newest attempt that ended, however many are tolerated."""
        self._book.raise_if_last_failed()

    @property
    def last_event(self) -> Event | None:
        """The latest event of this process."""
        return self._log.last_event

    def stats(self) -> dict[str, object]:
        """Counts for ``CFManager.stats``, and the state of the mirror, where there is one."""
        return {
            **self._mirror.stats(),
            "last_durable_step": self._book.last_durable_step,
            "num_committed": self._book.num_committed,
            "num_failed": self._book.num_failed,
            "num_in_flight": self._book.num_active,
            "num_workers_replaced": self._num_replaced,
        }

    # ---- replies

    def _on_reply(self, reply: p.Message) -> None:
        match reply:
            case p.Committed():
                self._committed(self._book.commit(reply), reply)
            case p.Failed():
                self._failed(self._book.fail(reply))
            case p.Waiting():
                logger.warning("the new persist worker waits for %s", reply.holder)
            case p.Opened():
                self._restarts.succeeded()
                if gone := self._catalog.remove_missing(self._store.steps()):
                    logger.error("%s: step(s) %s are gone", self._store.root, gone)
            case p.Retaken():
                logger.error("%s", reply.message)
                self.record("retaken", -1, message=reply.message)
                self._catalog.remove_missing(reply.steps)
            case p.OpenFailed():
                logger.error("the new persist worker cannot use the directory: %s", reply.message)
                # From here as with any dead worker: the next poll reports its death, and ``reap``
                # replaces it after a pause.
                self._client.kill()
                self._restarts.failed(time.monotonic())
            case p.Trouble():
                logger.error(
                    "%s failed: %s\n%s", reply.request, reply.message, reply.child_traceback
                )
                self.record("trouble", -1, request=reply.request, message=reply.message)
                if reply.request == "Prune":
                    self._catalog.removals_answered()
            case p.Mirrored():
                self._client.prune_mirror(self._mirror.take(reply.report), once=0)
            case p.Done(request="Prune"):
                self._catalog.removals_answered(reply.steps)
                if reply.steps:
                    self.record("pruned", max(reply.steps), steps=list(reply.steps))

    def _committed(self, attempt: Attempt, reply: p.Committed) -> None:
        self._handed_twice.discard(attempt.id)
        if attempt.is_inherited:
            self._catalog.remove_missing(self._store.steps())  # it may have set some aside
        elif self._supersede_after is not None:
            self._catalog.remove_later_than(self._supersede_after)
            self._supersede_after = None
        self._catalog.add(attempt, reply)
        self._log.committed(
            attempt,
            reply,
            at_step=self._current_step(),
            costs=partial(self._on_ended, attempt),
        )
        self._tell_cost(reply)
        self._alarm.succeeded(attempt.step)  # before ``durable``: it reports since when none was
        if not reply.is_part and not attempt.is_disowned:
            self._alarm.durable(attempt.step)
        if attempt.late_marks is not None:
            self._send_marks(attempt.step, attempt.late_marks)
        if self._supersede_after is None:  # else the step that was restored may be an older one
            self._prune()

    def _failed(self, attempt: Attempt) -> None:
        assert attempt.error is not None
        self._handed_twice.discard(attempt.id)
        if self._role.leads:
            self._catalog.add_if_left(attempt)
        self._on_ended(attempt)
        self._log.failed(attempt, steps_at_risk=self._alarm.steps_at_risk)
        self._alarm.failed(attempt.step, attempt.error)
        self._make_room(attempt)

    def _send_marks(self, step: int, marks: Marks) -> None:
        if self._role.leads:
            self._client.ask(p.AddMark(step, marks.keep, marks.metrics))
            self._catalog.add_marks(step, marks)

    def _prune(self) -> None:
        if self._role.leads and (steps := self._catalog.request_removals()):
            self._client.ask(p.Prune(steps))

    def _make_room(self, attempt: Attempt) -> None:
        """After a failure for lack of room: remove what the retention gives up for the disk."""
        if not (self._role.leads and attempt.missing_bytes and self._catalog.is_loaded):
            return
        if steps := self._catalog.make_room(attempt.missing_bytes):
            logger.warning(
                "%s: the disk had no room for step %d (%s more needed): removing step(s) %s",
                self._store.root,
                attempt.step,
                size_text(attempt.missing_bytes),
                list(steps),
            )
            self._client.ask(p.Prune(steps))

    def _tell_cost(self, reply: p.Committed) -> None:
        """With the first commit, whose size is known: what the retention will keep."""
        if self._told_cost or not self._role.leads:
            return
        self._told_cost = True
        if isinstance(self._retention, Retention):
            logger.info(
                "retention: with checkpoints of %s, it keeps %s",
                size_text(reply.total_bytes),
                self._retention.cost().text(reply.total_bytes),
            )

    # ---- death

    def _check_deadlines(self) -> None:
        """Kill a worker that is stuck; the next poll notices, and replaces it."""
        if not self._book.num_active:
            return
        now_s = time.perf_counter()
        limit_s = self._config.persist_timeout_s
        waits_for_parts = self._role.leads and len(self._role.group) > 1
        for attempt in self._book.active:
            # The worker takes attempts one by one, and may wait for parts with each of them.
            if waits_for_parts:
                limit_s += self._config.rank_timeout_s
            handed_s = attempt.handed_s
            if handed_s is None or attempt.error is not None:
                continue
            if now_s - handed_s > limit_s:
                logger.error(
                    "step %d is not durable after %.0f s (CFConfig.persist_timeout_s): "
                    "killing its worker",
                    attempt.step,
                    now_s - handed_s,
                )
                attempt.handed_s = now_s  # the replacement gets the same time again
                self._client.kill()
                return

    def _worker_died(self, error: WorkerDiedError) -> None:
        """Replace the worker; an attempt with which a second worker died has failed."""
        logger.error("%s; starting another", error)
        self.record("worker_died", error.step, error=str(error))
        abandoned = None
        held = [a for a in self._book.active if self._client.holds(a.id)]
        for attempt in held[:1]:  # it works in order, so it died with the oldest
            if attempt.id in self._handed_twice:
                self._client.forget(attempt.id)
                abandoned = self._book.abandon(attempt, error)
                self._failed(abandoned)
            else:
                self._handed_twice.add(attempt.id)
        self._client.replace()
        self._num_replaced += 1
        if abandoned is not None:
            self._tell_failure(abandoned)

    def _tell_failure(self, attempt: Attempt) -> None:
        """On a member: tell the leader not to wait for a part that will not come."""
        if not self._role.leads:
            self._client.ask(p.TellFailure(attempt.step, attempt.id, str(attempt.error)))


def _versions() -> dict[str, str]:
    import torch

    return {
        "checkfreq": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
