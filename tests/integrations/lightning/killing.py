"""Runs a case to its end, then again under SIGKILLs at random instants, and compares histories.

``python -m tests.integrations.lightning.killing SEED CASE FOLDER ...`` imports Lightning once, and
forks each life; it ends each case with a line ``CASE: passed`` or ``CASE: failed``. A life's
history must be a piece of the uninterrupted one, without a gap, that begins at the boundary it
restored; the state at the end must be the same, bit for bit.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.integrations.lightning.program import CASES, NUM_SAMPLES, Event, Instant, train

FORK = multiprocessing.get_context("fork")
NUM_KILLS = 8
LIMIT_S = 240.0
#: A life that is quick must not outrun its kill.
MOST_REPORTS_AFTER_AIM = 6


@dataclass(frozen=True)
class Kill:
    """SIGKILL after rank 0 reported ``instant``, and ``spin`` turns of an empty loop."""

    instant: Instant
    spin: int


@dataclass
class Lived:
    """What the ranks of one life reported, and how they ended."""

    events: list[list[Event]]
    exit_codes: list[int | None] = field(default_factory=list)


def run_life(name: str, folder: Path, kill: Kill | None, *, seed: int) -> Lived:
    """Run the ranks of one life to their end, their own or ours."""
    world = CASES[name].world
    port = _free_port()
    pipes = [FORK.Pipe() for _ in range(world)]
    ranks = [
        FORK.Process(target=_live, args=(name, folder, rank, port, there, kill, seed))
        for rank, (_, there) in enumerate(pipes)
    ]
    for one in ranks:
        one.start()
    for _, there in pipes:
        there.close()
    lived = Lived([[] for _ in ranks])
    open_pipes = {here: rank for rank, (here, _) in enumerate(pipes)}
    deadline = time.monotonic() + LIMIT_S
    while open_pipes:
        # Loader workers inherit pipe and sentinel, and outlive a killed trainer for seconds.
        ready = wait([*open_pipes], timeout=0.1)
        if time.monotonic() > deadline:
            for one in ranks:
                one.kill()
            raise AssertionError(f"not over in {LIMIT_S} s: {lived.events[0][-3:]}")
        for here in [one for one in open_pipes if one in ready]:
            rank = open_pipes[here]
            try:
                event = here.recv()
            except (EOFError, ConnectionResetError):
                del open_pipes[here]
                continue
            lived.events[rank].append(event)
            if kill is not None and rank == 0 and event.instant == kill.instant:
                here.send("go on")
                for _ in range(kill.spin):
                    pass
                for one in random.Random(kill.spin).sample(ranks, len(ranks)):
                    one.kill()
        gone = [rank for rank, one in enumerate(ranks) if one.exitcode is not None]
        for here, rank in list(open_pipes.items()):
            if rank in gone and not here.poll():
                del open_pipes[here]
    for one in ranks:
        one.join(LIMIT_S)
        lived.exit_codes.append(one.exitcode)
    return lived


def _live(
    name: str, folder: Path, rank: int, port: int, pipe: Connection, kill: Kill | None, seed: int
) -> None:
    if (world := CASES[name].world) > 1:
        os.environ.update(
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            | {"LOCAL_WORLD_SIZE": str(world), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "kills"}
        )
    reports_left: list[int] = []

    def report(event: Event) -> None:
        pipe.send(event)
        if rank or kill is None:
            return
        if reports_left:
            reports_left[0] -= 1
            if not reports_left[0]:
                pipe.recv()  # never comes: the kill is on its way
        elif event.instant == kill.instant:
            pipe.recv()
            reports_left.append(MOST_REPORTS_AFTER_AIM)

    try:
        train(name, folder, report, seed=seed)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    pipe.close()


def check(lived: Lived, whole: Lived) -> int:
    """Each rank repeats the uninterrupted run from the boundary it restored; returns where."""
    starts = []
    for found, expected in zip(lived.events, whole.events, strict=True):
        if not found:
            continue
        first = found[0]
        start = next(
            number
            for number, event in enumerate(expected)
            if event.instant[0] in ("batch", "done")
            and (event.step == first.step or first.instant[0] == event.instant[0] == "done")
        )
        for number, event in enumerate(found):
            other = expected[start + number]
            assert event.history == other.history, _told(event, other)
        starts.append(start)
    return min(starts, default=-1)


def _told(found: Event, expected: Event) -> str:
    if not isinstance(found.data, dict) or not isinstance(expected.data, dict):
        return f"\nfound     {found.history}\nexpected  {expected.history}"
    names = [name for name in found.data if found.data[name] != expected.data[name]]
    return "\n".join(f"{n}:\n {found.data[n]}\n {expected.data[n]}" for n in names)


def check_samples(whole: Lived) -> None:
    """Each whole epoch serves every sample once."""
    served: dict[int, list[int]] = {}
    batches: dict[int, int] = {}
    for events in whole.events:
        for event in events:
            if event.instant[0] == "batch":
                assert isinstance(event.data, tuple)
                served.setdefault(event.instant[1], []).extend(event.data[0])
                batches[event.instant[1]] = batches.get(event.instant[1], 0) + 1
    for epoch, ids in served.items():
        assert len(ids) == len({*ids})
        if len(ids) == 4 * batches[epoch] / len(whole.events) and batches[epoch] >= 7:
            assert sorted(ids) == list(range(NUM_SAMPLES))


def run_case(name: str, folder: Path, *, seed: int) -> None:
    """Kill the case at random instants, and compare."""
    whole = run_life(name, folder / "whole", None, seed=0)
    assert not any(whole.exit_codes), whole.exit_codes
    check_samples(whole)
    history, dice = whole.events[0], random.Random(f"{name}{seed}")
    reached, num_resumed, durable = 0, 0, 0
    pace = max(2, 2 * (len(history) - 2) // (NUM_KILLS + 1))
    for number in range(NUM_KILLS + 1):
        kill = None
        if number < NUM_KILLS:
            aim = min(reached + dice.randint(1, pace), len(history) - 2)
            kill = Kill(history[aim].instant, int(10 ** dice.uniform(1.0, 5.5)))
        lived = run_life(name, folder / "killed", kill, seed=number if durable else 0)
        expected = 0 if kill is None else -9
        assert lived.exit_codes == [expected] * len(lived.exit_codes), lived.exit_codes
        start = check(lived, whole)
        if start < 0:
            continue
        assert start <= reached + 1
        first = lived.events[0][0]
        is_over = first.instant[0] == "done"
        assert is_over or first.step >= durable, "a checkpoint that was durable is lost"
        num_resumed += is_over or first.step > 0
        reached = max(reached, start + len(lived.events[0]) - 1)
        durable = max(durable, *(event.durable_step for event in lived.events[0]))
        print(f"{name}: from event {start} to {reached} of {len(history) - 1}, {kill}", flush=True)
    assert reached == len(history) - 1
    assert num_resumed >= 3


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


if __name__ == "__main__":
    for case, place in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        try:
            run_case(case, Path(place), seed=int(sys.argv[1]))
        except BaseException:
            traceback.print_exc(file=sys.stdout)
            print(f"{case}: failed", flush=True)
        else:
            print(f"{case}: passed", flush=True)
