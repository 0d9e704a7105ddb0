"""The killer: runs a case to its end, then again with SIGKILLs, and compares the histories.

Every life's history must be a piece of the uninterrupted one, without a gap, that begins at
the boundary it restored. That is the whole claim: nothing skipped, nothing served twice, the
same samples, the same augmented bits, the same losses, and at the end the same state.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.acceptance.cases import CASES
from tests.acceptance.trainer import RESTORING, Event, Instant, Life, train
from tests.fork_server import FORK_SERVER

logger = logging.getLogger(__name__)

LIFE_LIMIT_S = 400.0


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL after ``instant`` was reported and ``spin`` turns of an empty loop."""

    instant: Instant
    spin: int


@dataclass(frozen=True, slots=True)
class Lived:
    """What one life reported, and whether it came to its own end."""

    events: list[Event]
    exit_code: int | None

    @property
    def restored_step(self) -> int:
        return next((e.step for e in self.events if e.instant[0] == "restored"), 0)

    @property
    def has_restored(self) -> bool:
        return any(event.instant[0] == "restored" for event in self.events)

    @property
    def restored_from(self) -> object:
        return next((e.data for e in self.events if e.instant[0] == "restored"), None)

    @property
    def history(self) -> list[Event]:
        return [e for e in self.events if e.instant[0] not in ("restoring", "restored")]


def run_life(life: Life, kill: Kill | None = None) -> Lived:
    """Run one trainer to its end, its own or ours."""
    events_here, events_there = FORK_SERVER.Pipe(duplex=False)
    aimed_there, aimed_here = FORK_SERVER.Pipe(duplex=False)
    life = replace(life, hold_at=kill.instant if kill else None)
    process = FORK_SERVER.Process(target=train, args=(life, events_there, aimed_there))
    process.start()
    events_there.close()
    aimed_there.close()
    events = []
    for event in _received(events_here, process.sentinel):
        events.append(event)
        if kill is not None and event.instant == kill.instant:
            aimed_here.send("go on")
            for _ in range(kill.spin):
                pass
            process.kill()
    process.join(LIFE_LIMIT_S)
    events_here.close()
    aimed_here.close()
    return Lived(events, process.exitcode)


def _received(connection: Connection, sentinel: int) -> Iterator[Event]:
    """Events until the process is dead and its pipe empty: a loader child may keep it open."""
    while True:
        ready = wait([connection, sentinel], timeout=LIFE_LIMIT_S)
        assert ready, f"nothing happened for {LIFE_LIMIT_S} s"
        if connection in ready:
            try:
                yield connection.recv()
            except EOFError:
                return
        elif not connection.poll():
            return


def planned_aims(history: list[Event]) -> list[list[Instant]]:
    """Where to kill: random instants, the edges of an epoch, its tail, and restore itself.

    The third to the fifth fall in one epoch, the second and the sixth in restore.
    """
    first, middle, later = (_epoch(history, e) for e in (0, 1, 2))
    return [
        first[len(first) // 2 : len(first) * 3 // 4],
        [RESTORING],
        _of_batch(middle, first=True),
        middle[: len(middle) // 2],
        _of_batch(middle, first=False),
        [RESTORING],
        [instant for instant in middle if instant[0].startswith("tail")],
        later[: len(later) * 3 // 4],
    ]


def _kill(aims: list[Instant], after: int, history: list[Event], dice: random.Random) -> Kill:
    """One of ``aims`` that no life has reached yet, else the next few instants to come."""
    if aims == [RESTORING]:
        return Kill(RESTORING, int(10 ** dice.uniform(1.0, 7.0)))  # up to 0.2 s: all of it
    to_come = [event.instant for event in history[after + 1 : -1]]
    instant = dice.choice([aim for aim in aims if aim in to_come] or to_come[:6])
    return Kill(instant, int(10 ** dice.uniform(1.0, 5.3)))  # up to 4 ms: some iterations


def _epoch(history: list[Event], epoch: int) -> list[Instant]:
    return [e.instant for e in history if e.instant[0] != "done" and e.instant[1] == epoch]


def _of_batch(instants: list[Instant], *, first: bool) -> list[Instant]:
    batches = [i[2] for i in instants if i[0] == "batch"]
    wanted = min(batches) if first else max(batches)
    return [i for i in instants if i[0] in ("batch", "loss") and i[2] == wanted]


def check_history(lived: Lived, whole: list[Event]) -> int:
    """A life repeats the uninterrupted run from the boundary that it restored; returns where."""
    start = next(
        i
        for i, event in enumerate(whole)
        if event.instant[0] in ("batch", "done") and event.step == lived.restored_step
    )
    found = [event.history for event in lived.history]
    expected = [event.history for event in whole[start : start + len(found)]]
    for one, other in zip(found, expected, strict=True):
        assert one == other, f"restored step {lived.restored_step}: {one}, uninterrupted: {other}"
    return start


def run_case(name: str, folder: Path, *, seed: int) -> int:
    """Kill the case as planned and compare; returns how many kills it took.

    Some lives leave their snapshots in memory to the next, and go on from what they find there.
    """
    whole = run_life(Life(name, folder / "whole", seed=0))
    assert whole.exit_code == 0
    dice = random.Random(f"{name}{seed}")
    reached = durable = num_resumed = 0
    is_left = False  # the life before left a snapshot of its own in memory
    aims: list[list[Instant]] = [*planned_aims(whole.history), []]
    for number, aim in enumerate(aims):
        kill = _kill(aim, reached, whole.history, dice) if number < len(aims) - 1 else None
        seed = number if durable else 0
        life = Life(name, folder / "killed", seed=seed, keeps_memory=number % 4 != 3)
        if is_left and life.keeps_memory:
            _wait_for_worker(folder / "killed")
        lived = run_life(life, kill)
        step = whole.history[reached].step if number else 0
        logger.info("%s: %s", name, _told(lived, kill, step))
        assert lived.exit_code == (0 if kill is None else -9)
        start = check_history(lived, whole.history)
        if lived.has_restored:
            assert lived.restored_step >= durable, "an acknowledged checkpoint is lost"
            assert step - lived.restored_step <= CASES[name].max_lag + 3
            if lived.restored_step and not life.keeps_memory:
                assert lived.restored_from == "directory"
            if is_left and life.keeps_memory:
                assert lived.restored_from == "memory"
        num_resumed += lived.restored_step > 0
        reached = max(reached, start + len(lived.history) - 1)
        newest = max(event.durable_step for event in lived.events)
        is_left = life.keeps_memory and newest > max(durable, lived.restored_step)
        durable = max(durable, newest)
    assert reached == len(whole.history) - 1
    assert num_resumed >= 3  # of nine lives; how many have something to resume depends on the disk
    return len(aims) - 1


def _wait_for_worker(folder: Path) -> None:
    """Until the killed trainer's worker has noticed: a process of the fork server starts faster."""
    deadline_s = time.monotonic() + LIFE_LIMIT_S
    while not any(path.is_socket() for path in folder.rglob(".*")):
        assert time.monotonic() < deadline_s, "no worker waits for a successor"
        time.sleep(0.01)


def _told(lived: Lived, kill: Kill | None, reached_step: int) -> str:
    end = "ended" if kill is None else f"killed {kill.spin} turns after {kill.instant}"
    if not lived.has_restored:
        return f"{end}, before restore returned"
    lost = reached_step - lived.restored_step
    last = lived.events[-1]
    return (
        f"restored step {lived.restored_step} from {lived.restored_from}, {lost} lost, {end}: "
        f"{last.instant} {last.step}"
    )
