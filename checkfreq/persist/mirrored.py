"""The mirror as the trainer knows it: the worker's latest report, and what follows from it.

The worker uploads; here its state becomes log lines, events and numbers, and the retention policy,
which may be the user's own class, decides what is removed there. Belongs to the training thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from checkfreq.mirror.report import Mirrored, MirrorReport, State
from checkfreq.mirror.settings import Mirror
from checkfreq.policy.retention import RetentionPolicy
from checkfreq.policy.retention_info import CheckpointInfo
from checkfreq.types import Json

logger = logging.getLogger(__name__)

#: Called with the beginning of an upload, or also its end: seconds of ``time.perf_counter``.
OnUpload = Callable[[float, float | None], object]


class MirrorView:
    """What is known of the run's mirror; ``mirror`` None: it has none.

    ``retention`` is the run's own, which applies there too unless the mirror has another.
    """

    def __init__(
        self,
        mirror: Mirror | None,
        retention: RetentionPolicy,
        *,
        record: Callable[..., None],
        on_upload: OnUpload = lambda began_s, ended_s: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._mirror = mirror
        self._retention = retention
        self._record = record
        self._on_upload = on_upload
        self._wall = wall
        self._report = MirrorReport(State.STARTING)
        self._why_not = ""  # it was uploading when it ended, if that is empty
        #: Since when nothing can be uploaded, as was said; None: since something was.
        self._failing_since_s: float | None = None

    def take(self, value: Json) -> tuple[int, ...]:
        """A report of the worker; returns the steps to remove from the mirror."""
        assert self._mirror is not None, "there is no mirror to report on"
        before, self._report = self._report, MirrorReport.from_json(value)
        self._log(before)
        if self._report.state is not State.ENDED or self._report.problem:
            said = {State.REFUSED: "it is written by ", State.WAITING: "it waited for "}
            self._why_not = said.get(self._report.state, "") + self._report.problem
        self._tell_upload(before)
        if self._report.num_uploaded == before.num_uploaded:
            return ()
        return self.to_remove()

    def to_remove(self, *, coming: CheckpointInfo | None = None) -> tuple[int, ...]:
        """The steps to remove from the mirror, or once ``coming`` is there too."""
        if self._mirror is None:
            return ()
        infos = {one.step: _info(one) for one in self._report.checkpoints}
        if coming is not None:
            infos.setdefault(coming.step, coming)
        policy = self._mirror.retention or self._retention
        return tuple(policy.to_remove([info for _, info in sorted(infos.items())]))

    @property
    def upload_s(self) -> float:
        """Seconds from durable to uploaded, as measured lately; 0.0 if that is not known.

        An upload in progress comes first, and shows that the next may take as long as it does.
        """
        report, usual_s = self._report, self._report.upload_s
        if report.state is not State.UPLOADING or report.began_s is None:
            return usual_s
        age_s = time.perf_counter() - report.began_s
        return max(age_s, 2 * usual_s - age_s)

    @property
    def wait_on_close_s(self) -> float:
        """How long the end of the run waits for its last upload."""
        return 0.0 if self._mirror is None else self._mirror.wait_on_close_s

    def stats(self) -> dict[str, object]:
        """For ``CFManager.stats``: nothing without a mirror."""
        if self._mirror is None:
            return {}
        report = self._report
        return {
            "mirror": {
                "url": self._mirror.url,
                "state": report.state.value,
                "uploaded_step": report.uploaded_step,
                "num_uploaded": report.num_uploaded,
                "upload_s": report.upload_s,
                "sent_bytes": report.sent_bytes,
                "held_steps": list(report.held),
                "problem": report.problem,
                "since_unix_s": report.since_s or None,
            }
        }

    def closed(self, newest_step: int) -> None:
        """The worker has ended; say so if the directory's newest step is not in the mirror."""
        if self._mirror is None:
            return
        there = self._report.uploaded_step
        if there is None or there < newest_step:
            logger.error(
                "step %d is not in the mirror %s (newest there: %s): %s. It is on disk; the next "
                "run in this directory uploads it",
                newest_step,
                self._mirror.url,
                "not known" if there is None else there,
                self._why_not
                or "the time for it was over (Mirror.wait_on_close_s, "
                "CFConfig.close_timeout_s or stop_grace_s, or a known end of the run)",
            )

    # ---- inside

    def _tell_upload(self, before: MirrorReport) -> None:
        report = self._report
        if report.began_s is not None and report.began_s != before.began_s:
            self._on_upload(report.began_s, None)
        if report.began_s is not None and before.state is State.UPLOADING:
            ended_s = report.ended_s or time.perf_counter()
            self._on_upload(report.began_s, ended_s)
        if report.num_uploaded != before.num_uploaded and report.step is not None:
            self._record(
                "uploaded",
                report.step,
                sent_bytes=report.sent_bytes,
                upload_s=(report.ended_s or 0.0) - (report.began_s or 0.0),
            )

    def _log(self, before: MirrorReport) -> None:
        """Each trouble once, when it begins; and its end."""
        assert self._mirror is not None
        report, url = self._report, self._mirror.url
        is_new = report.state is not before.state
        if before.state in (State.WAITING, State.REFUSED) and report.state is State.IDLE:
            logger.warning(
                "uploads to %s begin: this run has the claim now, after %.0f s of waiting for %s "
                "(newest there: %s)",
                url,
                self._wall() - before.since_s,
                before.problem,
                report.uploaded_step,
            )
        since_s = self._failing_since_s
        if since_s is not None and report.num_uploaded > before.num_uploaded:
            for_s = self._wall() - since_s
            logger.warning("the mirror %s can be written again, after %.0f s", url, for_s)
            self._failing_since_s = None
        if report.damaged and report.damaged != before.damaged:
            logger.warning("an object in the mirror %s is sent again: %s", url, report.damaged)
        if report.state is State.FAILING and since_s is None:
            self._failing_since_s = report.since_s
            self._failing(url)
        elif report.state is State.WAITING and is_new:
            logger.warning("nothing is uploaded to %s yet: waiting for %s", url, report.problem)
        elif report.state is State.REFUSED and is_new:
            logger.error(
                "nothing is uploaded to %s: it is written by %s. Once that run has ended, this one "
                "uploads what is newer. If they are two different runs, give each a prefix of its "
                "own",
                url,
                report.problem,
            )
            self._record("mirror_refused", -1, holder=report.problem)
        elif report.state is State.ENDED and report.problem not in ("", before.problem):
            logger.error("the mirror %s has ended with an error:\n%s", url, report.problem)
        elif report.state is State.IDLE and report.problem:
            logger.error("the mirror %s: %s", url, report.problem)

    def _failing(self, url: str) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._report.since_s))
        newest = self._report.uploaded_step
        logger.error(
            "nothing can be uploaded to %s since %s (newest there: %s): %s. Training and "
            "checkpoints on disk go on; it is tried again at growing pauses",
            url,
            since,
            "none" if newest is None else f"step {newest}",
            self._report.problem,
        )
        self._record("mirror_failing", -1, error=self._report.problem)


def _info(mirrored: Mirrored) -> CheckpointInfo:
    return CheckpointInfo(
        mirrored.step,
        keep=mirrored.keep,
        metrics=mirrored.metrics,
        created_s=mirrored.created_s,
        num_bytes=mirrored.num_bytes,
        at_epoch_end=mirrored.at_epoch_end,
    )
