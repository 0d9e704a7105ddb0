"""One training with a mirror, told to end in one of many ways: how it ended, and what was left.

A cell is a state of the mirror, what ends the run, and who brings it back. The mirror is healthy
until it has a checkpoint, and again after the run has ended.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from checkfreq.mirror.reader import MirrorReader
from tests.notices.conftest import Server
from tests.notices.test_clouds import ACTION
from tests.s3.proxy import Fault, FaultProxy
from tests.s3.server import S3Server
from tests.slurm.cluster import ENDED, Cluster, wait_until
from tests.slurm.jobs import Job, bare, submit

MIRRORS = ("healthy", "slow", "failing", "unreachable")
EVENTS = ("SIGTERM", "SIGUSR1", "time limit", "spot notice", "scancel", "preemption")
WAYS = ("requeue", "script", "supervised")
#: ``CFConfig.stop_grace_s``; the cluster leaves more.
GRACE_S = 15
_NOTICE_S = 30.0
#: Where the job's limit is what ends a run that does not.
_LIMITED = ("SIGUSR1", "time limit")
#: What a slow mirror takes for an object: longer than anything waits here.
_SLOW_S = 150.0
#: So long after a job began, its limit can still become the next whole minute.
_EARLY_S = 35.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination."""

    mirror: str
    event: str
    way: str

    def __str__(self) -> str:
        return "-".join((self.mirror, self.event, self.way)).replace(" ", "-")

    @property
    def is_for_good(self) -> bool:
        """Whether nobody wants the run to come back."""
        return self.event == "scancel"


CELLS = [Cell(mirror, event, way) for event in EVENTS for mirror in MIRRORS for way in WAYS]


def covers_pairs(cell: Cell) -> bool:
    """Whether a cell is one of those in which each two values of two kinds meet once."""
    mirror, event = MIRRORS.index(cell.mirror), EVENTS.index(cell.event)
    return WAYS[(mirror + event) % len(WAYS)] == cell.way


@dataclass(frozen=True, slots=True)
class Ending:
    """How the first run of a cell ended, and what became of its job.

    ``status`` None: it was killed. ``took_s``: from the event until then; ``left_s``: from then
    until a process would have been ended. ``stopped_at``: the last step that was trained;
    ``durable`` and ``mirrored``: the newest in the directory and in the mirror, None for none;
    ``mirrored_last``: that one once the job had ended. ``log`` is what was printed.
    """

    status: int | None
    took_s: float
    left_s: float
    state: str
    num_restarts: int
    stopped_at: int
    durable: int
    mirrored: int | None
    trained: int
    mirrored_last: int
    log: str

    def line(self) -> dict[str, object]:
        """What is recorded of it."""
        return {name: value for name, value in asdict(self).items() if name != "log"}


class Outage:
    """What a mirror is like while this is on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_on = False
        self.seen = threading.Event()
        self._over = threading.Event()

    def __call__(self, method: str, path: str) -> Fault:
        """See `Plan`."""
        if not self.is_on or self.kind == "healthy":
            return Fault.NONE
        if self.kind == "unreachable":
            return Fault.HANG
        is_piece = method == "PUT" and "/objects/" in path
        if is_piece or self.kind == "failing":
            self.seen.set()
        if is_piece and self.kind == "slow":
            self._over.wait(_SLOW_S)
        return Fault.NONE

    def begin(self, proxy: FaultProxy) -> None:
        """From now on; requests of kept connections get no answer from one that is unreachable."""
        self.is_on = True
        if self.kind == "failing":
            proxy.refuses = (403, "ExpiredToken")
        if self.kind in ("healthy", "unreachable"):
            self.seen.set()
        if self.kind == "unreachable":
            proxy.leave()

    def end(self, proxy: FaultProxy) -> None:
        """All is well again."""
        self.is_on, proxy.refuses = False, None
        self._over.set()
        if self.kind == "unreachable":
            proxy.come_back()


@dataclass(frozen=True, slots=True)
class Place:
    """Where cells are played: all at once, each with a node and a proxy of its own."""

    cluster: Cluster
    s3: S3Server
    metadata: Server
    folder: Path

    def play(self, cell: Cell, node: str) -> Ending:
        """Have one run end, and its job as well. AssertionError if that takes too long."""
        outage, source = Outage(cell.mirror), MirrorReader(self.s3.mirror(str(cell)))
        with FaultProxy(self.s3.port, outage).listening() as proxy:
            job = self._submit(cell, node, proxy.port)
            self._wait(job, lambda: bool(source.steps()))
            outage.begin(proxy)
            newest = job.newest()
            self._wait(job, lambda: job.newest() > newest and outage.seen.is_set())
            began_s = time.time()
            ends_at_s = self._tell_to_end(cell, job, node)
            wait_until(lambda: bool(_ends(job)) or self._has_ended(job), job.log)
            self.metadata.answers.pop(_action(cell), None)  # the next machine has no notice
            first = {"status": None, "at_unix_s": time.time(), **next(iter(_ends(job)), {})}
            mirrored = max(source.steps(), default=None)
            outage.end(proxy)
            state, *_ = self.cluster.wait_for_end(job.number)
        for step in source.steps():
            source.verify(step)
        return Ending(
            status=first["status"],
            took_s=first["at_unix_s"] - began_s,
            left_s=ends_at_s - first["at_unix_s"],
            state=state,
            num_restarts=self.cluster.restarts(job.number),
            stopped_at=job.stops()[0],
            durable=job.newest() if cell.is_for_good else job.starts()[1],
            mirrored=mirrored,
            trained=job.newest(),
            mirrored_last=source.steps()[-1],
            log=job.log(),
        )

    def _submit(self, cell: Cell, node: str, port: int) -> Job:
        folder = self.folder / str(cell)
        folder.mkdir()
        variables = self.s3.variables(port=port)
        export = ",".join(f"{name}={value}" for name, value in variables.items())
        options = [f"--nodelist={node}", "--cpus-per-task=40", "--signal=URG@1"]
        options += ["--partition=spot" if cell.event == "preemption" else "--partition=main"]
        options += ["--time=2" if cell.event in _LIMITED else "--time=60"]
        more = [
            "--mirror",
            self.s3.mirror(str(cell)).url,
            f"--stop-grace-s={GRACE_S}",
            "--chk-freq=5",
        ]
        if cell.event == "spot notice":
            more += ["--metadata-url", f"{self.metadata.url}/{cell}"]
            self.metadata.answers[f"PUT /{cell}/latest/api/token"] = (200, "token")
        within = [sys.executable, "-S", str(Path(__file__).with_name("recorder.py"))]
        within += [str(folder / "ends.jsonl")]
        if cell.way == "requeue":
            given = {"more": more, "export": export, "within": within}
            return bare(self.cluster, folder, *options, slow_runs=1, **given)
        if cell.way == "supervised":
            within += [sys.executable, "-m", "checkfreq.cli", "run", "--"]
        trains = [sys.executable, "-m", "tests.slurm.trainer", "--slow-runs=1"]
        command = [*within, *trains, *more, str(folder / "chk")]
        return submit(
            self.cluster, "single.sbatch", folder, options, command=command, export=export
        )

    def _tell_to_end(self, cell: Cell, job: Job, node: str) -> float:
        """What the cell is about; returns when the run will be ended."""
        call, number = self.cluster.call, job.number
        match cell.event:
            case "SIGTERM":
                call("scancel", "--signal=TERM", number)
            case "SIGUSR1" if cell.way == "requeue":
                call("scancel", "--signal=USR1", number)
            case "SIGUSR1":
                self.cluster.signal_script(number)
            case "time limit":
                self._bring_limit_near(job)
            case "spot notice":
                ends_at_s = time.time() + _NOTICE_S
                at = datetime.fromtimestamp(ends_at_s, timezone.utc).isoformat()
                answer = json.dumps({"action": "terminate", "time": at})
                self.metadata.answers[_action(cell)] = (200, answer)
                return ends_at_s
            case "scancel":
                call("scancel", number)
            case "preemption":
                above = ("--partition=prio", f"--nodelist={node}", "--cpus-per-task=40")
                call("sbatch", "--mem=100", "--output=/dev/null", *above, "--wrap=true")
        if cell.event in _LIMITED:
            return _unix_s(self.cluster.shown(number, "EndTime"))
        return time.time() + GRACE_S

    def _bring_limit_near(self, job: Job) -> None:
        """Change the job's limit to the next whole minute, if that leaves time to hear of it."""
        began_s = _unix_s(self.cluster.shown(job.number, "StartTime"))
        if time.time() < began_s + _EARLY_S:
            self.cluster.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")

    def _wait(self, job: Job, holds: Callable[[], bool]) -> None:
        """Until something holds; the job must not end before."""
        wait_until(lambda: holds() or self._has_ended(job), job.log)
        assert holds(), job.log()

    def _has_ended(self, job: Job) -> bool:
        return self.cluster.states(job.number)[0] in ENDED


def _ends(job: Job) -> list[dict[str, float]]:
    """The ends of the runs so far that nobody killed."""
    path = job.folder / "ends.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _action(cell: Cell) -> str:
    """What a run asks for to learn of a spot notice."""
    method, path = ACTION.split()
    return f"{method} /{cell}{path}"


def _unix_s(local: str) -> float:
    return datetime.fromisoformat(local).timestamp()
