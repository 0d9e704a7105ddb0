"""Stops a training at one instant after the other, and holds its lives against a whole run.

A run that was stopped has lost nothing: the events of its lives, put one after the other, are those
of a run that nobody stopped, batch by batch and bit by bit. Each life that was told to stop ends
with status 75, and what it learnt last is durable.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkfreq.store.store import CheckpointStore
from tests.fork_server import FORK_SERVER
from tests.stops.aiming import Case, Instant, draw
from tests.stops.program import BATCH_SIZE, BATCHES, EPOCHS, Life, main

logger = logging.getLogger(__name__)

STOPPED = 75

#: From the signal to the end of the process; only a defect takes so long.
LIMIT_S = 90.0

#: For so long training waits for an upload to come to an instant. If none does, since too little
#: is left to upload, it goes on, before the other ranks' patience ends.
_UPLOADED_WITHIN_S = 10.0

_LOOK_S = 0.005


@dataclass
class Lived:
    """One life of all ranks: what each wrote down, and how it ended."""

    events: list[list[Any]]
    statuses: list[int | None]
    logs: str
    #: Batches that each rank had begun when the signal was sent; None: it was not sent.
    batches_before: int | None = None

    def has(self, kind: str) -> bool:
        """Whether a rank reported an event of this kind."""
        return any(event[0] == kind for events in self.events for event in events)


@dataclass
class Run:
    """A training in a folder, over its lives."""

    folder: Path
    case: Case
    chk_dir: Path = Path()
    mirrors: bool = False
    num_lives: int = 0
    history: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.history = [[] for _ in range(self.case.world)]
        if self.chk_dir == Path():
            self.chk_dir = self.folder / "chk"

    @property
    def step(self) -> int:
        """Batches learnt by each rank."""
        return sum(event[0] == "loss" for event in self.history[0])

    @property
    def mirror_dir(self) -> Path:
        """Where checkpoints are uploaded to, if the run ``mirrors``."""
        return self.folder / "mirror"

    def live(
        self,
        instant: Instant | None = None,
        *,
        meanwhile: Callable[[], object] = lambda: None,
        **settings: Any,
    ) -> Lived:
        """One life, stopped at an instant; ``meanwhile`` is called just before the signal."""
        self.num_lives += 1
        base = {"folder": str(self.folder), "chk": str(self.chk_dir), "number": self.num_lives}
        if self.mirrors:
            base["config"] = {"mirror": self.mirror_dir.as_uri()}
        settings = {**base, **settings}
        lives = [self._life(rank, instant, settings) for rank in range(self.case.world)]
        with running(lives) as pids:
            before = instant and self._signal(instant, lives, pids, meanwhile)
            return self._end(lives, pids, before)

    def _life(self, rank: int, instant: Instant | None, settings: dict[str, Any]) -> Life:
        case = self.case
        base = {"rank": rank, "world": case.world, "workers": case.workers, **settings}
        if instant is None:
            return Life(**base)
        base = {"chk_freq": instant.chk_freq, "on_stop": instant.on_stop} | base
        if rank != instant.rank:
            return Life(**base)
        holds, gate = {}, str(self._gate())
        if instant.kind == "upload":  # which takes longer than all of this training
            holds["validation"] = [1, str(self._gate("-training")), _UPLOADED_WITHIN_S]

        match instant.kind:
            case "place":
                holds[instant.where] = [instant.hit, gate]
            case "trainer":
                base["trainer_fault"] = f"{instant.where}:pause-{gate}:{instant.hit}"
            case "worker" | "upload":
                base["worker_fault"] = f"{instant.where}:pause-{gate}:{instant.hit}"
        return Life(**base, holds=holds)

    def _gate(self, which: str = "") -> Path:
        return self.folder / f"gate-{self.num_lives}{which}"

    def _signal(
        self, instant: Instant, lives: list[Life], pids: list[int], meanwhile: Callable[[], object]
    ) -> int | None:
        """Send the signal; returns how many batches each rank had begun, None if it is over."""
        gate = self._gate()
        if instant.kind in ("start", "time"):
            has_begun = _made if instant.kind == "start" else _begun
            if not self._until(lambda: has_begun(lives), pids):
                return None
            time.sleep(instant.wait_s)
        else:
            reached = Path(f"{gate}.reached")
            if not self._until(reached.exists, pids):
                return None
            if instant.is_late or (len(lives) > 1 and not _begun(lives)):
                gate.touch()
                self._gate("-training").touch()
        # A rank of many that dies at its start is no stop, but a failed start.
        if len(lives) > 1 and not self._until(lambda: _begun(lives), pids):
            return None
        for _ in range(instant.spin if instant.is_late else 0):
            pass
        meanwhile()
        before = min(_num_batches(life) for life in lives)
        self._kill(instant, pids)
        gate.touch()
        self._gate("-training").touch()
        if instant.again_s is not None:
            self._until(lambda: False, pids, limit_s=instant.again_s)
            self._kill(instant, pids)
        return before

    def _kill(self, instant: Instant, pids: list[int]) -> None:
        match self.case.to:
            case "process":
                aims = [pids[instant.rank]]
            case "group":
                aims = [-pids[0]]
            case _:
                aims = [*pids, *descendants(pids)]
        for aim in aims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(aim, signal.SIGTERM)

    def _until(
        self, is_there: Callable[[], bool], pids: list[int], *, limit_s: float = LIMIT_S
    ) -> bool:
        """Wait for something; False if the run ended, or the time, without it."""
        end_s = time.monotonic() + limit_s
        while not is_there():
            ended = any(status_of(pid, limit_s=_LOOK_S) is not None for pid in pids)
            if ended or time.monotonic() > end_s:
                return is_there()
        return True

    def _end(self, lives: list[Life], pids: list[int], before: int | None) -> Lived:
        statuses = [status_of(pid, limit_s=LIMIT_S) for pid in pids]
        if None in statuses:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # faulthandler prints every stack
                status_of(pid, limit_s=10.0)
        events = [_events(life) for life in lives]
        logs = "\n".join(f"-- {life.log_path}\n{_text(life.log_path)[-6000:]}" for life in lives)
        lived = Lived(events, statuses, logs, before)
        assert None not in statuses, f"it did not end within {LIMIT_S} s\n{logs}"
        return lived

    def take(self, lived: Lived) -> None:
        """What a life learnt is part of the run."""
        for history, events in zip(self.history, lived.events, strict=True):
            history += [e for e in events if e[0] in ("batch", "loss", "tail", "end")]


@contextlib.contextmanager
def running(lives: list[Life]) -> Iterator[list[int]]:
    """Process ids of the trainers, in a process group; they are dead when the block is left."""
    pids: list[int] = []
    try:
        for life in lives:
            process = FORK_SERVER.Process(target=_train, args=(life, pids[0] if pids else 0))
            process.start()
            assert process.pid is not None
            _TRAINERS[process.pid] = process
            pids.append(process.pid)
            while os.getpgid(pids[0]) != pids[0]:  # before others can join its group
                time.sleep(_LOOK_S)
        yield pids
    finally:
        for pid in pids:
            process = _TRAINERS.pop(pid)
            process.kill()
            process.join(30.0)
            process.close()


def status_of(pid: int, *, limit_s: float) -> int | None:
    """A trainer's exit status (negative: the signal that ended it); None if it runs after all."""
    _TRAINERS[pid].join(limit_s)
    status: int | None = _TRAINERS[pid].exitcode
    return status


_TRAINERS: dict[int, Any] = {}


def _train(life: Life, group: int) -> None:
    """The process: a script that ends as under a launcher, but for the end of the interpreter."""
    os.setpgid(0, group)
    log = os.open(life.log_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    status: Any = 0
    try:
        main(life)
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


def descendants(pids: list[int]) -> list[int]:
    """Process ids of all children of these, and theirs."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = list(pids)
    for pid in found:  # it grows
        found += parents.get(pid, [])
    return found[len(pids) :]


def _events(life: Life) -> list[Any]:
    return [json.loads(line) for line in _text(life.events_path).splitlines()]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _num_batches(life: Life) -> int:
    return _text(life.events_path).count('["batch"')


def _made(lives: list[Life]) -> bool:
    """Whether every rank has its manager."""
    return all('["made"' in _text(life.events_path) for life in lives)


def _begun(lives: list[Life]) -> bool:
    """Whether every rank has passed a boundary in this life: signals are handled from there."""
    return all(_num_batches(life) > 1 for life in lives)


# ---- a whole run, and one that is stopped over and over


@dataclass(frozen=True)
class Whole:
    """A run that nobody stopped, and how long it took from its restore on."""

    history: list[list[Any]]
    training_s: float


def run_whole(folder: Path, case: Case) -> Whole:
    """Train to the end; every sample comes once in every epoch."""
    run = Run(folder, case)
    lived = run.live()
    assert lived.statuses == [0] * case.world, lived.logs
    run.take(lived)
    for epoch in range(EPOCHS):
        served = [
            sample
            for events in run.history
            for kind, *values in events
            if kind == "batch" and values[0] == epoch
            for sample in values[1]
        ]
        assert sorted(served) == list(range(BATCHES * BATCH_SIZE * case.world))
    (began_s,), (ended_s,) = (
        [event[-1] for event in lived.events[0] if event[0] == kind]
        for kind in ("restored", "closed")
    )
    return Whole(run.history, ended_s - began_s)


def stop_over_and_over(
    folder: Path, case: Case, whole: Whole, *, num_instants: int, seed: object
) -> list[Instant]:
    """Stop runs of ``case`` at so many instants; returns them. Each run ends as the whole one."""
    dice = random.Random(f"{seed} {case}")
    instants: list[Instant] = []
    run, num_runs = None, 0
    while len(instants) < num_instants or run is not None:
        if run is None:
            run = Run(folder / f"run-{num_runs}", case, mirrors=dice.random() < 0.4)
            num_runs += 1
        left_s = whole.training_s * (1 - run.step / (EPOCHS * BATCHES))
        wanted = draw(dice, case, whole_s=left_s, mirrors=run.mirrors)
        instant = wanted if len(instants) < num_instants else None
        lived = run.live(instant)
        if lived.batches_before is not None:
            assert instant is not None
            instants.append(instant)
        logger.info("%s: %s at step %s: %s", case, instant, run.step, lived.statuses)
        try:
            is_over = check(run, lived, whole)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}, {case}, {instant} in life {run.num_lives} of {run.folder}: "
                f"{error}; statuses {lived.statuses}\n{lived.logs}"
            ) from error
        if is_over:
            run = None
    return instants


def check(run: Run, lived: Lived, whole: Whole) -> bool:
    """Hold a life against the documented ways to end; whether the run is over now."""
    world = run.case.world
    if (
        lived.statuses == [-signal.SIGTERM] * world
        and lived.batches_before in (0, 1)
        # It may have arrived so late that all was done, or in a life that had nothing left to do.
        and (not lived.has("end") or not (lived.has("batch") or lived.has("closed")))
    ):
        return False  # before the first boundary of this life: nothing is lost, nothing learnt
    run.take(lived)
    _compare(run, whole)
    if lived.has("end"):
        # Once the manager is closed, a first signal ends the process as it would without one.
        fine = (0, -signal.SIGTERM) if lived.batches_before is not None else (0,)
        for events, status in zip(lived.events, lived.statuses, strict=True):
            assert status in fine[: 1 + ("closed" in [e[0] for e in events])], lived.statuses
        assert run.history == whole.history
    else:
        assert lived.batches_before is not None, "it ended without a signal"
        assert lived.statuses == [STOPPED] * world, lived.statuses
    store = CheckpointStore(run.chk_dir)
    assert store.steps()[-1:] == [run.step], (store.steps(), run.step)
    assert store.verify(run.step).step == run.step
    if run.mirrors:
        marker = run.mirror_dir / "checkpoints" / f"step-{run.step:08d}.json"
        assert marker.exists(), "the last checkpoint was not uploaded"
    return lived.has("end")


def _compare(run: Run, whole: Whole) -> None:
    for rank, (found, expected) in enumerate(zip(run.history, whole.history, strict=True)):
        for one, other in zip(found, expected, strict=False):
            assert one == other, f"rank {rank}: {one}, in a run that nobody stopped: {other}"
