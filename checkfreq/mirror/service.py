"""The mirror's thread in the persist worker: uploads what was committed, and nothing else waits.

`committed`, `marks_changed`, `remove`, `held` and `finish` are called by the worker's other threads
and only take notes. The thread does one act after another; an act that fails is done again after a
pause that grows (`Backoff`), and until then nothing else is affected: commits go on.

In order: the lock that keeps two workers of one directory from uploading at once, the claim on the
prefix, and then, whenever they are due: renewing the claim, the newest checkpoint, marks, removals,
reading back what checkpoints share.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

from checkfreq import faults
from checkfreq.errors import CheckFreqError, CorruptCheckpointError, NoCheckpointError
from checkfreq.mirror.bandwidth import Bandwidth
from checkfreq.mirror.claim import RENEW_EVERY_S, ClaimKeeper, Ownership
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import FINISHED, MARKS, Finish, Marker, decode_marks, encode_marks
from checkfreq.mirror.queue import UploadQueue
from checkfreq.mirror.removal import RemoteMarkers
from checkfreq.mirror.report import Mirrored, MirrorReport, State
from checkfreq.mirror.settings import Mirror
from checkfreq.mirror.uploader import UploadAbandonedError, Uploaded, Uploader
from checkfreq.policy.backoff import Backoff
from checkfreq.store.manifest import Manifest
from checkfreq.store.marks import StepMark
from checkfreq.store.store import CheckpointStore

logger = logging.getLogger(__name__)

#: How often another's claim, or lock, is looked at again, and how often that of a live run.
_LOOK_AGAIN_S = 2.0
_ASK_AGAIN_S = RENEW_EVERY_S
#: The longest pause after a failure once the run ends.
_LAST_PAUSE_S = 5.0
#: How long the end of a run waits for a service that has been failing, and sends nothing yet.
_LAST_TRY_S = 10.0
#: Uploads whose longest is what the next one is expected to take.
_RECENT = 3
#: More than an upload takes, to be left before the end of the run when the last one begins.
_SPARE_S = 5.0
#: The longest wait without anything to do; the claim is renewed in between.
_IDLE_S = RENEW_EVERY_S


class MirrorService:
    """One mirror of one directory.

    ``run``: the run's identity, kept in the directory. ``try_lock`` takes the lock against an
    earlier worker that is still uploading. ``ends_at_s``: when the run ends, by ``clock``, as far
    as is known. ``report`` is called on the mirror's thread.
    """

    def __init__(
        self,
        mirror: Mirror,
        store: CheckpointStore,
        *,
        run: str,
        report: Callable[[MirrorReport], None],
        try_lock: Callable[[], bool] = lambda: True,
        ends_at_s: Callable[[], float] = lambda: math.inf,
        connect: Callable[[Mirror], RemoteObjects] = RemoteObjects,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._mirror = mirror
        self._store = store
        self._run_id = run
        self._tell = report
        self._try_lock = try_lock
        self._ends_at_s = ends_at_s
        self._connect = connect
        self._clock = clock
        self._wall = wall
        self._changed = threading.Condition()
        # Below: notes of other threads, under ``_changed``.
        self._queue = UploadQueue(every_s=mirror.every_s)
        self._committed_here: set[int] = set()
        self._aside_after: int | None = None
        self._removals: tuple[frozenset[int], int] = frozenset(), 0
        self._marks_are_new = True
        self._end_by_s: float | None = None
        self._look_again_s = 0.0
        self._is_last_try = False
        # Below: the thread's own.
        self._is_locked = False
        self._is_inspected = False
        self._claim_backoff, self._backoff = Backoff(), Backoff()
        self._failed_s = 0.0
        #: Why nothing can be uploaded, and since when: until something was.
        self._trouble, self._trouble_since_s = "", 0.0
        self._cannot_remove = False
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        self._began_s = 0.0
        self._report = MirrorReport(State.STARTING)
        self._there: dict[int, Marker] = {}
        self._remote_marks: dict[int, StepMark] = {}
        self._finish: Finish | None = None
        self._thread = threading.Thread(target=self._live, name="checkfreq-mirror", daemon=True)

    # ---- for other threads

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def committed(self, step: int, *, set_aside_after: int | None = None) -> None:
        """``step`` is durable; steps later than ``set_aside_after`` were set aside for it."""
        with self._changed:
            self._queue.committed(step, set_aside_after=set_aside_after)
            self._committed_here.add(step)
            if set_aside_after is not None:
                self._aside_after = set_aside_after
            self._marks_are_new = True
            self._changed.notify()

    def marks_changed(self) -> None:
        """A pin, a metric or the end of the run was recorded."""
        with self._changed:
            self._marks_are_new = True
            self._changed.notify()

    def remove(self, steps: Collection[int], *, once: int) -> None:
        """Remove these from the mirror once it has ``once``, or a later step; the newest stays.

        What was asked before and is not done yet is forgotten.
        """
        with self._changed:
            self._removals = frozenset(steps), once
            self._changed.notify()

    def held(self) -> frozenset[int]:
        """Steps that must not be removed from the directory yet: the mirror wants them."""
        with self._changed:
            return self._queue.held()

    def finish(self, timeout_s: float) -> bool:
        """Upload the newest checkpoint, give the claim up and end; False if time ran out.

        A service that has been failing is tried once.
        """
        with self._changed:
            self._queue.hurry()
            self._look_again_s = 0.0
            self._end_by_s = end_s = self._clock() + timeout_s
            self._is_last_try = self._report.state is State.FAILING
            self._changed.notify()
        if self._is_last_try:
            self._thread.join(min(timeout_s, _LAST_TRY_S))
            if self._report.state is State.FAILING:
                self._end_by_s = self._clock()
        self._thread.join(max(0.0, min(end_s, self._end_by_s) - self._clock()) + 1.0)
        return not self._thread.is_alive()

    # ---- the thread

    def _live(self) -> None:
        try:
            self._work()
        except Exception:
            # A bug of ours. It ends the mirror, not the worker: commits matter more.
            self._say(State.ENDED, problem=traceback.format_exc())

    def _work(self) -> None:
        self._remote = self._connect(self._mirror)
        self._claim = ClaimKeeper(
            self._remote, run=self._run_id, clock=self._clock, wall=self._wall
        )
        self._markers = RemoteMarkers(self._remote)
        self._uploader = Uploader(
            self._remote,
            self._store,
            bandwidth=Bandwidth(self._mirror.max_bytes_per_s),
            part_bytes=self._mirror.part_bytes,
            go_on=self._go_on,
        )
        while (act := self._next_act()) is not None:
            self._do(act)
        if not self._trouble:
            self._give_up_claim()
        self._say(State.ENDED)

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except UploadAbandonedError:
            with self._changed:
                self._queue.failed()
        except (CheckFreqError, OSError) as error:
            self._failed(act, error)
        else:
            if self._is_about_claim(act):
                self._claim_backoff.succeeded()

    def _failed(self, act: Callable[[], None], error: Exception) -> None:
        self._failed_s = self._clock()
        with self._changed:
            self._queue.failed()
            if self._is_last_try:
                self._end_by_s = self._failed_s
        (self._claim_backoff if self._is_about_claim(act) else self._backoff).failed(self._failed_s)
        if not self._trouble:
            self._trouble_since_s = self._wall()
        self._trouble = self._mirror.scrub(f"{type(error).__name__}: {error}")
        self._say(State.FAILING)

    def _complain(self, problem: str) -> None:
        """Tell of what keeps no later checkpoint from being uploaded."""
        if not self._trouble:
            self._say(State.IDLE, problem=self._mirror.scrub(problem))

    def _is_about_claim(self, act: Callable[[], None]) -> bool:
        return act in (self._lock, self._take_claim, self._renew)

    def _say(self, state: State, **changes: object) -> None:
        if state is State.IDLE and self._trouble:
            state = State.FAILING
        usual = {
            "problem": self._trouble,
            "since_s": self._trouble_since_s,
            "damaged": "",
            "held": tuple(sorted(self.held())),
        }
        fields: dict[str, object] = {**usual, **changes, "state": state}
        self._report = replace(self._report, **fields)  # type: ignore[arg-type]
        self._tell(self._report)

    # ---- what comes next

    def _next_act(self) -> Callable[[], None] | None:
        """Wait for the next thing to do; None once the run has ended."""
        with self._changed:
            while True:
                now_s = self._clock()
                if self._end_by_s is not None and (now_s >= self._end_by_s or self._has_nothing()):
                    return None
                coming = self._coming(now_s)
                if coming is None and self._end_by_s is not None:
                    return None
                act, left_s = coming or (None, _IDLE_S)
                if act is not None and left_s <= 0:
                    return act
                if self._end_by_s is not None:
                    left_s = min(left_s, self._end_by_s - now_s)
                self._changed.wait(min(left_s, _IDLE_S))

    def _has_nothing(self) -> bool:
        """Whether there is neither a claim to give up nor a checkpoint to upload.

        Then the end of the run does not wait for a service that refuses it.
        """
        idle = self._queue.next_step is None and not self._claim.is_ours
        return idle and not self._store.steps()

    def _pause_s(self, backoff: Backoff, now_s: float) -> float:
        """Until the next try after failures; at the end of a run there is no time for long ones."""
        left_s = 0.0 if self._is_last_try else backoff.left_s(now_s)
        if self._end_by_s is None:
            return left_s
        return min(left_s, max(0.0, self._failed_s + _LAST_PAUSE_S - now_s))

    def _coming(self, now_s: float) -> tuple[Callable[[], None], float] | None:
        """The next act, and in how many seconds it is due; None if there is none."""
        claim_s = max(self._pause_s(self._claim_backoff, now_s), self._look_again_s - now_s)
        pause_s = self._pause_s(self._backoff, now_s)
        if not self._is_locked:
            return self._lock, claim_s
        if not self._claim.is_ours:
            if self._end_by_s is not None and self._look_again_s - now_s > _LOOK_AGAIN_S:
                return None  # a live run's claim was asked for once more
            return self._take_claim, claim_s
        if self._claim.is_due:
            return self._renew, claim_s
        if not self._is_inspected:
            return self._inspect, pause_s
        acts: list[tuple[Callable[[], None], float]] = []
        if self._queue.next_step is not None:
            acts.append((self._upload, max(pause_s, self._upload_in_s(now_s))))
        if self._marks_are_new:
            acts.append((self._send_marks, pause_s))
        doomed, once = self._removals
        if doomed and once <= max(self._there, default=-1):
            acts.append((self._remove, pause_s))
        if self._uploader.has_unverified and self._end_by_s is None:
            acts.append((self._verify, pause_s))
        return min(acts, key=lambda one: one[1], default=None)

    def _upload_in_s(self, now_s: float) -> float:
        """Until the next upload may begin: not where the run's last one would have to wait for it.

        If there is no last one by when it would have to begin, this one begins after all.
        """
        wait_s = self._queue.wait_s(now_s)
        if self._end_by_s is None and self._recent_s:
            upload_s = max(self._recent_s)
            last_in_s = self._ends_at_s() - now_s - upload_s - _SPARE_S
            if 0.0 < last_in_s < upload_s + _SPARE_S:
                return max(wait_s, last_in_s)
        return wait_s

    def _go_on(self, sending: float | None) -> None:
        """During an upload: keep the claim, and end what is not worth it; see `Uploader`."""
        if not self._claim.renew_if_due():
            self._lose_claim()
            raise UploadAbandonedError
        with self._changed:
            if sending is None or self._end_by_s is None:
                return
            left_s = self._end_by_s - self._clock()
            is_late = left_s <= 0.0
            if is_late or (self._queue.is_overtaken and self._newest_needs_s(sending) <= left_s):
                raise UploadAbandonedError

    def _newest_needs_s(self, sending: float) -> float:
        """Until the newest checkpoint is uploaded if this upload ends once ``sending`` is sent."""
        age_s = self._clock() - self._began_s
        upload_s = max((age_s, *self._recent_s))
        return upload_s + min(upload_s - age_s, sending * upload_s)

    # ---- acts: lock and claim

    def _lock(self) -> None:
        self._is_locked = self._try_lock()
        if not self._is_locked:
            self._wait_for("an earlier worker of this directory, which is still uploading")

    def _take_claim(self) -> None:
        faults.reach("mirror.claim")
        match self._claim.take():
            case Ownership.OURS:
                self._is_inspected = False
            case Ownership.WAITING:
                self._wait_for(f"the claim of {self._claim.holder}, which may be alive")
            case Ownership.REFUSED:
                self._refuse(self._claim.holder)

    def _wait_for(self, what: str) -> None:
        self._look_again(_LOOK_AGAIN_S)
        if self._report.state is not State.WAITING:
            self._say(State.WAITING, problem=what, since_s=self._wall())

    def _refuse(self, holder: str) -> None:
        self._look_again(_ASK_AGAIN_S)
        if self._report.state is not State.REFUSED:
            self._say(State.REFUSED, problem=holder, since_s=self._wall())

    def _look_again(self, in_s: float) -> None:
        with self._changed:
            self._look_again_s = self._clock() + in_s

    def _renew(self) -> None:
        if not self._claim.renew():
            self._lose_claim()

    def _lose_claim(self) -> None:
        self._refuse("another run, which took the claim over while this one was not running")

    def _give_up_claim(self) -> None:
        """So that the next run need not wait; best effort."""
        with contextlib.suppress(CheckFreqError, OSError):
            self._claim.release()

    # ---- acts: what is there

    def _inspect(self) -> None:
        """See what earlier runs left, here and there."""
        self._there = self._markers.read()
        self._remote_marks = self._read_marks()
        self._finish = self._read_finish()
        newest_there = max(self._there, default=None)
        if newest_there is not None:
            self._remember(self._there[newest_there])
        newest = self._newest_here()
        with self._changed:
            if self._claim.is_contested and newest_there is not None:
                self._queue.only_after(newest_there)
            is_newer = newest is not None and (newest_there is None or newest > newest_there)
            if newest is not None and is_newer and self._queue.next_step is None:
                self._queue.committed(newest)
        self._is_inspected = True
        self._say(State.IDLE, **self._contents())
        self._removing(self._markers.sweep)

    def _newest_here(self) -> int | None:
        steps = self._store.steps()
        return steps[-1] if steps else None

    def _remember(self, marker: Marker) -> None:
        """Its pieces need not be sent again; nothing is lost if its manifest cannot be read."""
        with contextlib.suppress(CorruptCheckpointError, FileNotFoundError):
            data, _ = self._remote.get(marker.manifest.key, max_bytes=marker.manifest.num_bytes)
            manifest = Manifest.decode(data, path=f"{self._remote.url}/{marker.manifest.key}")
            self._uploader.remember(manifest, marker)

    def _read_marks(self) -> dict[int, StepMark]:
        try:
            return decode_marks(self._remote.get(MARKS)[0], url=self._remote.url)
        except FileNotFoundError:
            return {}
        except CorruptCheckpointError as error:
            logger.warning("the marks in the mirror cannot be read: %s", error)
            return {}

    def _read_finish(self) -> Finish | None:
        try:
            return Finish.decode(self._remote.get(FINISHED)[0], url=self._remote.url)
        except (FileNotFoundError, CorruptCheckpointError):
            return None

    def _contents(self) -> dict[str, object]:
        marks = self._remote_marks
        found = [
            Mirrored(
                step,
                keep=marks.get(step, StepMark()).keep,
                metrics=marks.get(step, StepMark()).metrics,
                created_s=marker.created_unix_s,
                num_bytes=marker.num_bytes,
                at_epoch_end=marker.at_epoch_end,
            )
            for step, marker in sorted(self._there.items())
        ]
        return {"checkpoints": tuple(found), "uploaded_step": max(self._there, default=None)}

    # ---- acts: uploads

    def _upload(self) -> None:
        self._began_s = self._clock()
        with self._changed:
            step = self._queue.next_step
            assert step is not None, "nothing to upload"
            self._queue.begin(step, now_s=self._began_s)
        self._say(State.UPLOADING, step=step, began_s=time.perf_counter(), ended_s=None)
        try:
            done = self._uploader.upload(step, at_epoch_end=self._is_epoch_end(step))
        except (NoCheckpointError, CorruptCheckpointError) as error:
            self._skip(step, error)
            return
        self._set_aside(step)
        self._there = self._markers.read()
        self._note(done)

    def _skip(self, step: int, error: CheckFreqError) -> None:
        """A step that was removed or damaged is not mirrored; a restore will quarantine it."""
        with self._changed:
            self._queue.failed()
            self._queue.forget(step)
        self._say(State.IDLE, ended_s=time.perf_counter())
        if not isinstance(error, NoCheckpointError):
            self._complain(f"step {step} is damaged and not uploaded: {error}")

    def _note(self, done: Uploaded) -> None:
        self._recent_s.append(done.seconds)
        self._backoff.succeeded()
        self._trouble, self._trouble_since_s = "", 0.0
        with self._changed:
            self._queue.ended(now_s=self._clock(), seconds=done.seconds)
        self._say(
            State.IDLE,
            ended_s=time.perf_counter(),
            sent_bytes=done.sent_bytes,
            num_uploaded=self._report.num_uploaded + 1,
            upload_s=max(self._recent_s),
            **self._contents(),
        )

    def _is_epoch_end(self, step: int) -> bool:
        return self._store.marks().get(step, StepMark()).at_epoch_end

    def _set_aside(self, step: int) -> None:
        """Markers of a future that the run went back from, now that there is a newer one."""
        with self._changed:
            if step not in self._committed_here or self._claim.is_contested:
                return  # there may be newer ones of another run, which are not this one's to judge
            after = step if self._aside_after is None else min(step, self._aside_after)
            own = set(self._committed_here)
        there = self._markers.read()
        self._markers.set_aside([one for one in there if one > after and one not in own])
        with self._changed:
            self._aside_after = None

    # ---- acts: marks and removals

    def _send_marks(self) -> None:
        with self._changed:
            self._marks_are_new = False
        try:
            self._merge_marks()
        except BaseException:
            with self._changed:
                self._marks_are_new = True
            raise

    def _merge_marks(self) -> None:
        here = self._store.marks()
        kept = set(self._there) | set(self._store.steps())
        merged = {s: m for s, m in {**self._remote_marks, **here}.items() if s in kept}
        if merged != self._remote_marks:
            self._remote.put(MARKS, encode_marks(merged))
            self._remote_marks = merged
        finish = self._finish_of(here)
        if finish is not None and finish != self._finish:
            self._remote.put(FINISHED, finish.encode())
            self._finish = finish
        pinned = {step for step, mark in here.items() if mark.keep} & set(self._store.steps())
        with self._changed:
            if self._end_by_s is None:
                self._queue.pinned(pinned - self._there.keys())

    def _finish_of(self, marks: dict[int, StepMark]) -> Finish | None:
        """Whether the run is finished, as the directory says; None if it says nothing."""
        newest = self._newest_here()
        if newest is None or newest not in self._there:
            return None  # the mirror's own newest decides until ours is there
        finished = marks.get(newest, StepMark()).finished
        return Finish(newest, finished) if finished or self._finish is not None else None

    def _verify(self) -> None:
        """Read back one object that checkpoints share; the newest is uploaded again if it must."""
        damage = self._uploader.verify_next(go_on=self._go_on_verifying)
        if damage is None:
            return
        step, text = damage
        with self._changed:
            if self._queue.next_step is None:
                self._queue.committed(step)
        self._say(State.IDLE, damaged=text)

    def _go_on_verifying(self) -> None:
        self._go_on(None)
        with self._changed:
            if self._end_by_s is not None:
                raise UploadAbandonedError

    def _remove(self) -> None:
        with self._changed:
            (steps, _), self._removals = self._removals, (frozenset(), 0)
        self._removing(lambda: self._markers.remove(steps))
        self._there = self._markers.read()
        self._say(State.IDLE, **self._contents())

    def _removing(self, remove: Callable[[], object]) -> None:
        """Remove something; where that is not allowed, say so once, and go on uploading."""
        try:
            remove()
        except OSError as error:
            self._markers.read()  # raises if it is the service that cannot be reached
            if not self._cannot_remove:
                self._complain(f"nothing can be removed there: {error}")
            self._cannot_remove = True
        else:
            self._cannot_remove = False
