"""Phase two as the manager sees it: snapshots go in, durable checkpoints and failures come out.

Owns the worker's handle, the attempts in flight, what is known of the directory, and the
record of what happened. A dead or stuck worker is replaced, and each attempt it held is handed
over a second time; one that fails twice has failed. Belongs to the training thread, except
``hand_over``.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from checkfreq import __version__
from checkfreq.config import CFConfig
from checkfreq.console import say
from checkfreq.errors import CheckFreqError, CorruptCheckpointError, WorkerDiedError
from checkfreq.events import Event, EventLog
from checkfreq.persist import protocol as p
from checkfreq.persist.alarm import Alarm
from checkfreq.persist.attempts import Attempt, AttemptBook, Marks
from checkfreq.persist.client import WorkerClient
from checkfreq.policy.backoff import Backoff
from checkfreq.policy.lifecycle import AttemptState
from checkfreq.policy.retention import CheckpointInfo, RetentionPolicy
from checkfreq.snapshot.arena import Slot
from checkfreq.store.marks import Mark
from checkfreq.store.store import CheckpointStore
from checkfreq.types import Json, Role

logger = logging.getLogger(__name__)

#: Between workers that could not use the directory: starting one takes time from training.
_LONGEST_REST_S = 10.0


class Persistence:
    """One directory, its worker, and the attempts of this run."""

    def __init__(
        self,
        chk_dir: Path,
        *,
        config: CFConfig,
        retention: RetentionPolicy,
        tolerate_failures: int | None,
        release: Callable[[Slot], None],
        role: Role = Role(),
    ) -> None:
        self.store = CheckpointStore(chk_dir)
        self.client = WorkerClient(chk_dir, config=config, role=role)
        self.book = AttemptBook(
            tolerate_failures=tolerate_failures, release=release, replaces=not role.shares_all
        )
        self.alarm = Alarm(tolerate_failures=tolerate_failures, on_failure=config.on_failure)
        self.last_event: Event | None = None
        self.num_replaced = 0
        self.supersede_after: int | None = None
        #: The step up to which every other directory of the run is known to have its share, so
        #: that retention may remove older ones; None: there is no other directory.
        self.confirmed_step: int | None = None
        self._config = config
        self._role = role
        self._retention = retention
        self._events = EventLog(
            chk_dir / "events.jsonl",
            self.store.ops if role.leads else None,
            max_bytes=config.max_events_bytes,
        )
        self._known: dict[int, CheckpointInfo] | None = None
        self._handed_twice: set[str] = set()
        self._restarts = Backoff(longest_s=_LONGEST_REST_S)
        #: What the worker was asked to remove, and has not answered yet.
        self._prunes: deque[tuple[int, ...]] = deque()
        #: Told of every attempt that ended; what it returns is noted with a commit.
        self.on_ended: Callable[[Attempt], Mapping[str, object]] = lambda attempt: {}

    # ---- opening

    def start(self) -> None:
        """Start the worker; does not wait for it."""
        self.client.start()

    @property
    def open_timeout_s(self) -> float:
        """How long opening may take."""
        return self.client.open_timeout_s

    def open(self, *, check: Callable[[int], object] | None = None) -> None:
        """Wait until the worker holds the directory, and look at what is there; idempotent.

        ``check`` raises if a step's record cannot be read; for a caller that knows some already.
        """
        self._open(self.client.wait_opened, check)

    def try_open(self, timeout_s: float, *, check: Callable[[int], object] | None = None) -> bool:
        """``open`` that waits for at most ``timeout_s``; whether the directory is open."""
        self._open(lambda: self.client.opens(timeout_s=timeout_s), check)
        return self._known is not None

    def _open(self, wait: Callable[[], bool], check: Callable[[int], object] | None) -> None:
        """``wait()``, once more if the worker died meanwhile; False: it is not open yet."""
        if self._known is not None:
            return
        try:
            is_open = wait()
        except WorkerDiedError as error:
            self._worker_died(error)
            is_open = wait()
        if is_open:
            self._known = self._look_around(check or self.store.manifest)

    def _look_around(self, check: Callable[[int], object]) -> dict[int, CheckpointInfo]:
        """The checkpoints that are there; one that cannot be read is left alone by retention."""
        known = {}
        marks = self.store.marks()
        for step in self.store.steps():
            try:
                check(step)
            except (CheckFreqError, OSError):
                continue
            mark = marks.get(step, Mark())
            known[step] = CheckpointInfo(step, keep=mark.keep, metrics=mark.metrics)
        return known

    # ---- attempts

    def hand_over(self, attempt: Attempt, objects: Json, own: Json = None) -> None:
        """Give a complete snapshot to the worker (called by the copy thread)."""
        self.client.submit(
            p.Persist(
                attempt=attempt.id,
                step=attempt.step,
                slot=attempt.slot.index,
                objects=objects,
                world=self._role.world,
                versions=_versions(),
                supersede_after=self.supersede_after,
                keep=attempt.marks.keep,
                metrics=attempt.marks.metrics,
                own=own,
                part_timeout_s=self._config.rank_timeout_s,
            )
        )

    def reap(self, *, timeout_s: float = 0.0) -> None:
        """Take in what happened since; waits at most ``timeout_s`` for the first reply."""
        for attempt in self.book.take_void():
            self._tell_failure(attempt)
            self._failed(attempt)
        if self._restarts.num_in_row and (rest_s := self._restarts.left_s(time.monotonic())) > 0:
            time.sleep(min(timeout_s, rest_s))  # there is no worker that could reply
            return
        try:
            while (reply := self.client.poll(timeout_s=timeout_s)) is not None:
                self._take(reply)
                timeout_s = 0.0
        except WorkerDiedError as error:
            self._worker_died(error)
        self._check_deadlines()  # after the replies: one of them may have been waiting for us

    def wait_until(
        self, condition: Callable[[], bool], *, timeout_s: float, look_every_s: float = 1.0
    ) -> bool:
        """Reap until ``condition()`` holds; False at the deadline.

        ``look_every_s``: how often to look where no reply tells that it holds.
        """
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self.reap(timeout_s=min(left_s, 0.05 if self._is_copying() else look_every_s))
        return True

    def _is_copying(self) -> bool:
        return any(a.state is AttemptState.COPYING for a in self.book.active)

    def add_marks(self, step: int, marks: Marks) -> None:
        """Pin, or give metrics to, a step that is on its way or committed."""
        attempt = self.book.find(step)
        if attempt is not None:
            attempt.mark(marks)
        else:
            self._send_marks(step, marks)

    def note_finished(self, step: int, *, finished: bool) -> None:
        """Have it noted whether the run is over with ``step``."""
        if self._role.leads:
            self.client.ask(p.AddMark(step, False, {}, finished))
            self.record("finished" if finished else "reopened", step)

    def is_finished(self, step: int) -> bool:
        """Whether the directory says that the run is over with ``step``."""
        return self.store.marks().get(step, Mark()).finished

    def confirm(self, step: int) -> None:
        """Every directory of the run holds its share of ``step``: what is older may go.

        That is an earlier step than before once the run has gone back to one.
        """
        is_news = self.confirmed_step is None or step > self.confirmed_step
        self.confirmed_step = step
        if self._known is None or not self._role.leads or not is_news:
            return
        if not self.store.ever_held_common():
            self.client.ask(p.Confirm(step))
        self._prune()

    def quarantine(self, step: int, reason: CorruptCheckpointError) -> None:
        """Have a damaged step set aside (by the leader, if that is another rank)."""
        if self._role.leads:
            self.client.ask(p.Quarantine(step, str(reason)))
        self.record("quarantined", step, reason=str(reason))
        if self._known is not None:
            self._known.pop(step, None)

    def close(self, *, timeout_s: float) -> None:
        """Let the worker finish and exit."""
        if not self.client.close(timeout_s=timeout_s):
            logger.error(
                "the persist worker did not finish within %.0f s and was killed", timeout_s
            )

    def record(self, kind: str, step: int, **data: object) -> None:
        """Note an event: in memory and in events.jsonl."""
        self.last_event = Event(kind, step, data)
        self._events.append(self.last_event)

    # ---- replies

    def _take(self, reply: p.Message) -> None:
        match reply:
            case p.Committed():
                self._committed(self.book.commit(reply), reply)
            case p.Failed():
                self._failed(self.book.fail(reply))
            case p.Waiting():
                logger.warning("the new persist worker waits for %s", reply.holder)
            case p.Opened():
                self._restarts.succeeded()
                if gone := self._forget_gone(self.store.steps()):
                    logger.error("%s: step(s) %s are gone", self.store.root, gone)
            case p.Retaken():
                logger.error("%s", reply.message)
                self.record("retaken", -1, message=reply.message)
                self._forget_gone(reply.steps)
            case p.OpenFailed():
                logger.error("the new persist worker cannot use the directory: %s", reply.message)
                self.client.kill()  # like any dead worker: replaced, its attempts counted
                self._restarts.failed(time.monotonic())
            case p.Trouble():
                logger.error(
                    "%s failed: %s\n%s", reply.request, reply.message, reply.child_traceback
                )
                self.record("trouble", -1, request=reply.request, message=reply.message)
                if reply.request == "Prune":
                    self._prunes.popleft()
            case p.Done(request="Prune"):
                self._prunes.popleft()
                self._pruned(reply.steps)

    def _committed(self, attempt: Attempt, reply: p.Committed) -> None:
        assert self._known is not None
        self._handed_twice.discard(attempt.id)
        self._set_aside_later_steps()
        self._known[attempt.step] = CheckpointInfo(
            attempt.step, keep=attempt.marks.keep, metrics=attempt.marks.metrics
        )
        if reply.warning:
            logger.warning("step %d is committed, but %s", attempt.step, reply.warning)
        if reply.kept_existing:
            logger.warning("step %d was already there and validates: kept as it is", attempt.step)
        self._report(attempt, reply)
        self.alarm.succeeded(attempt.step)
        if not reply.is_part:
            self.alarm.durable(attempt.step)
        if attempt.late_marks is not None:
            self._send_marks(attempt.step, attempt.late_marks)
        self._prune()

    def _report(self, attempt: Attempt, reply: p.Committed) -> None:
        copy_s = (attempt.copied_s or attempt.started_s) - attempt.started_s
        rate = reply.num_bytes / max(reply.persist_s, 1e-9)
        say(
            logger,
            "checkpoint of step %d (%s): %.1f MiB, held training %.2f ms, copied in %.3f s, "
            "persisted in %.3f s (%.2f GB/s)",
            attempt.step,
            attempt.reason,
            reply.num_bytes / 2**20,
            attempt.stall_s * 1e3,
            copy_s,
            reply.persist_s,
            rate / 1e9,
            is_shown=self._role.rank == 0 and self.book.num_committed == 1,
        )
        self.record(
            "committed",
            attempt.step,
            reason=attempt.reason,
            num_bytes=reply.num_bytes,
            stall_s=attempt.stall_s,
            copy_s=copy_s,
            write_s=reply.write_s,
            persist_s=reply.persist_s,
            durable_monotonic_s=attempt.durable_s,
            bytes_per_s=rate,
            direct=reply.direct,
            kept_existing=reply.kept_existing,
            costs=self.on_ended(attempt),
        )

    def _forget_gone(self, there: Collection[int]) -> list[int]:
        """Steps that were known and are not ``there``: somebody removed them."""
        known = self._known or {}
        gone = sorted(known.keys() - set(there))
        for step in gone:
            del known[step]
        return gone

    def _note_left(self, attempt: Attempt) -> None:
        """A commit that failed in its last sync leaves its step: for retention to remove."""
        if self._known is None or not self._role.leads or attempt.step in self._known:
            return
        with contextlib.suppress(CheckFreqError, OSError):
            if self.store.manifest(attempt.step).attempt == attempt.id:
                self._known[attempt.step] = CheckpointInfo(
                    attempt.step, keep=attempt.marks.keep, metrics=attempt.marks.metrics
                )

    def _failed(self, attempt: Attempt) -> None:
        assert attempt.error is not None
        self._handed_twice.discard(attempt.id)
        self._note_left(attempt)
        self.on_ended(attempt)
        self.record(
            "failed",
            attempt.step,
            reason=attempt.reason,
            error=str(attempt.error),
            steps_at_risk=self.alarm.steps_at_risk,
        )
        self.alarm.failed(attempt.step, attempt.error)

    def _set_aside_later_steps(self) -> None:
        assert self._known is not None
        if self.supersede_after is not None:
            limit = self.supersede_after
            self._known = {step: info for step, info in self._known.items() if step <= limit}
            self.supersede_after = None

    def _send_marks(self, step: int, marks: Marks) -> None:
        assert self._known is not None
        if not self._role.leads:
            return
        self.client.ask(p.AddMark(step, marks.keep, marks.metrics))
        old = self._known.get(step, CheckpointInfo(step))
        self._known[step] = CheckpointInfo(
            step, keep=old.keep or marks.keep, metrics={**old.metrics, **marks.metrics}
        )

    def _prune(self) -> None:
        assert self._known is not None
        if not self._role.leads:
            return
        infos = sorted(self._known.values(), key=lambda info: info.step)
        steps = self._retention.to_remove(infos)
        if self.confirmed_step is not None:
            steps = [step for step in steps if step < self.confirmed_step]
        steps = [step for step in steps if not any(step in asked for asked in self._prunes)]
        if steps:
            self._prunes.append(tuple(steps))
            self.client.ask(p.Prune(tuple(steps)))

    def _pruned(self, steps: Collection[int]) -> None:
        assert self._known is not None
        for step in steps:
            self._known.pop(step, None)
        if steps:
            self.record("pruned", max(steps), steps=list(steps))

    # ---- death

    def _check_deadlines(self) -> None:
        now_s = time.perf_counter()
        limit_s = self._config.persist_timeout_s
        waits_for_parts = self._role.leads and len(self._role.group) > 1
        for attempt in self.book.active:
            if waits_for_parts:  # for those of each attempt before this one too
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
                attempt.handed_s = now_s  # the replacement gets as long again
                self.client.kill()
                return

    def _worker_died(self, error: WorkerDiedError) -> None:
        logger.error("%s; starting another", error)
        self.record("worker_died", error.step, error=str(error))
        abandoned = None
        held = [a for a in self.book.active if self.client.holds(a.id)]
        for attempt in held[:1]:  # it works in order: the oldest is what it died with
            if attempt.id in self._handed_twice:
                self.client.forget(attempt.id)
                abandoned = self.book.abandon(attempt, error)
                self._failed(abandoned)
            else:
                self._handed_twice.add(attempt.id)
        self.client.replace()
        self.num_replaced += 1
        if abandoned is not None:
            self._tell_failure(abandoned)

    def _tell_failure(self, attempt: Attempt) -> None:
        """Have the leader, if that is another rank, not wait for a part that will not come."""
        if not self._role.leads:
            self.client.ask(p.TellFailure(attempt.step, attempt.id, str(attempt.error)))


def _versions() -> dict[str, str]:
    import torch

    return {
        "checkfreq": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
