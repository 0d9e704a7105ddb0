"""The mirror of a worker's directory, if it has one: started with the directory, ended with it.

Everything is called on the request thread but `held` and `cut`.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from checkfreq.persist.lock import DirectoryLock
from checkfreq.store.store import CheckpointStore
from checkfreq.types import Json

if TYPE_CHECKING:  # a third of the time in which a worker starts, for those that have a mirror
    from checkfreq.mirror.report import MirrorReport
    from checkfreq.mirror.service import MirrorService


class Uploads:
    """The uploads from one directory. ``report`` is called on the mirror's thread."""

    def __init__(self, report: Callable[[MirrorReport], None]) -> None:
        self._report = report
        self._service: MirrorService | None = None
        self._lock: DirectoryLock | None = None
        self._for_s = 0.0

    def start(
        self,
        settings: Json,
        store: CheckpointStore,
        *,
        owner_pid: int,
        ends_at_s: Callable[[], float],
    ) -> None:
        """Upload from now on what is committed. An earlier worker may still be doing so.

        ``settings``: see ``protocol.Open``. ``ends_at_s``: see `MirrorService`.
        """
        from checkfreq.mirror.identity import run_identity
        from checkfreq.mirror.report import MirrorReport, State
        from checkfreq.mirror.service import MirrorService
        from checkfreq.mirror.settings import Mirror

        mirror = Mirror.from_json(settings)
        try:
            run = run_identity(store)
        except OSError as error:
            self._report(MirrorReport(State.ENDED, problem=str(error)))
            return
        self._lock = lock = DirectoryLock(store.root, name=".mirror.lock")
        self._for_s = mirror.wait_on_close_s
        self._service = MirrorService(
            mirror,
            store,
            run=run,
            report=self._report,
            try_lock=lambda: lock.try_now(owner_pid=owner_pid),
            ends_at_s=ends_at_s,
        )
        self._service.start()

    def held(self) -> frozenset[int]:
        """Steps that must not be removed from the directory yet. Any thread."""
        return frozenset() if self._service is None else self._service.held()

    def held_text(self, error: Exception) -> str:
        """Where the disk is full: what is on it only because the mirror has not got it yet."""
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        held = sorted(self.held()) if is_full else []
        named = ", ".join(map(str, held))
        return f" (step(s) {named} are kept on disk until the mirror has them)" if held else ""

    def committed(self, step: int, *, set_aside_after: int | None) -> None:
        """``step`` is durable; steps later than ``set_aside_after`` were set aside for it."""
        if self._service is not None:
            self._service.committed(step, set_aside_after=set_aside_after)

    def marks_changed(self) -> None:
        """A pin, a metric or the end of the run was recorded."""
        if self._service is not None:
            self._service.marks_changed()

    def remove(self, steps: tuple[int, ...], *, once: int) -> None:
        """See `MirrorService.remove`."""
        if self._service is not None:
            self._service.remove(steps, once=once)

    def finish(self, for_s: float | None) -> bool:
        """Upload the newest checkpoint; False if an upload is still in progress after ``for_s``.

        None: as long as the mirror's settings say. Nothing is uploaded after that.
        """
        if self._service is None:
            return True
        has_ended = self._service.finish(self._for_s if for_s is None else for_s)
        if has_ended:
            self._service = None
            if self._lock is not None:
                self._lock.release()  # a worker that lingers may be followed by another
        return has_ended

    def cut(self) -> None:
        """End an upload in progress soon, which is resumed by whoever uploads next. Any thread."""
        if self._service is not None:
            threading.Thread(target=self._service.finish, args=(0.0,), daemon=True).start()
