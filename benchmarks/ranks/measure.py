"""What a meeting of the ranks costs, by the number of ranks: as a tree, and as a star.

    python -m benchmarks.ranks --ranks 2 16 64 256 512
    python -m benchmarks.ranks --records 16 256 4096    # their records instead

Light processes (``fork`` from one that has imported torch; no model, no process group) hold a
connection to a store of torch.distributed, which a process of its own keeps, as under torchrun.
They vote as at a boundary with nothing to do. Arms take turns in every round: ``tree``, with
each fan-in; ``star``, where rank 0 reads every rank's words; ``star, polled``, as it was before
there was a tree, with pauses that do not depend on the number of ranks.

``rank_cpu_us``, ``root_cpu_us`` and ``store_cpu_us``: processor time per meeting of the median
rank, of rank 0, and of the process that keeps the store. ``latency_ms``: from one meeting's end to
the next one's on rank 0. With many more ranks than cores that is the processor time of all of
them, which machines of their own would spend at the same time. ``between_us``: what a boundary at
which the ranks do not meet takes to find that out. ``low`` and ``high`` are quartiles over the
rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from benchmarks.lab.estimate import quartiles
from benchmarks.lab.record import emit, median_ratio
from benchmarks.ranks.records import measure_records
from benchmarks.ranks.star import PolledStar
from checkfreq.policy.ending import Needs
from checkfreq.ranks.coordinator import Proposal
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import Merge
from checkfreq.ranks.store_thread import StoreThread
from checkfreq.ranks.tally import Vote
from checkfreq.ranks.tree import FAN_IN
from checkfreq.ranks.voting import VOTES, Voting
from checkfreq.types import Json

_STAR, _POLLED = "star", "star, polled"
_TIMEOUT_S = 300.0
_WARM_UP = 3
#: Ranks times meetings of one arm and round, so that rounds take about as long for any number.
_WORDS = 6000
_FEWEST, _MOST = 12, 400
_BOUNDARIES = 2000
#: So many ranks connect at a time: a store resets connections beyond the backlog of its socket.
_CONNECTING = 32

#: By arm, and by figure, the value of each round.
Figures = dict[str, dict[str, list[float]]]


class Meets(Protocol):
    """An arm, on one rank."""

    def meet(self, phase: str, said: Json, *, merge: Merge) -> Json:
        """Hold a meeting."""
        ...


def main() -> None:
    """Print a line for each arm of each number of ranks."""
    args = _arguments()
    if args.records:
        measure_records(args.records)
        return
    for world in args.ranks:
        figures = measured(world, args)
        for arm, found in figures.items():
            _report(world, arm, found, figures[_POLLED], args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 16, 64, 256, 512])
    parser.add_argument("--fan-in", type=int, nargs="+", default=[FAN_IN])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--records",
        type=int,
        nargs="+",
        default=[],
        metavar="RANKS",
        help="instead of meetings, the records of so many ranks: see benchmarks/ranks/records.py",
    )
    return parser.parse_args()


def _report(
    world: int,
    arm: str,
    found: Mapping[str, list[float]],
    polled: Mapping[str, list[float]],
    args: argparse.Namespace,
) -> None:
    spread = {name: quartiles(values) for name, values in found.items()}
    emit(
        "ranks",
        what="meeting",
        ranks=world,
        arm=arm,
        rounds=args.rounds,
        meetings=num_meetings(world),
        **{name: round(statistics.median(values), 3) for name, values in found.items()},
        low={name: round(low, 3) for name, (low, _) in spread.items()},
        high={name: round(high, 3) for name, (_, high) in spread.items()},
        root_cpu_against_polled=round(median_ratio(found["root_cpu_us"], polled["root_cpu_us"]), 3),
        latency_against_polled=round(median_ratio(found["latency_ms"], polled["latency_ms"]), 3),
    )


def num_meetings(world: int) -> int:
    """How many meetings of one arm follow one another in a round."""
    return max(_FEWEST, min(_MOST, _WORDS // world))


def arms_of(fan_ins: Sequence[int]) -> dict[str, int | None]:
    """The arms with their fan-in; None: every rank is rank 0's child."""
    return {**{f"tree of {fan_in}": fan_in for fan_in in fan_ins}, _STAR: None, _POLLED: None}


def measured(world: int, args: argparse.Namespace) -> Figures:
    """What ``world`` ranks measured, by arm."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.ranks.measure"])
    ours, theirs = context.Pipe()
    keeper = context.Process(target=_keep_store, args=(theirs,))
    keeper.start()
    try:
        port = ours.recv()
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            result = Path(folder) / "figures.json"
            options = (world, port, keeper.pid, args.fan_in, args.rounds, result)
            ranks = context.Process(target=_fork_ranks, args=options)
            ranks.start()
            ranks.join()
            if ranks.exitcode != 0:
                raise RuntimeError(f"{world} ranks ended with {ranks.exitcode}, expected 0")
            figures: Figures = json.loads(result.read_text())
        return figures
    finally:
        ours.send(None)
        keeper.join()


def _keep_store(pipe: Connection) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def _fork_ranks(world: int, *options: Any) -> None:
    """Fork the ranks and wait for them; if one fails, none goes on."""
    os.setpgrp()
    connected, connects = os.pipe()
    for rank in range(world):
        if rank >= _CONNECTING:
            os.read(connected, 1)
        _forked(connects, rank, world, *options)
    for _ in range(world):
        _, status = os.wait()
        if status != 0:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(0, signal.SIGKILL)


def _forked(connects: int, *options: Any) -> None:
    if os.fork() == 0:
        code = 1
        try:
            rank = _Rank(*options)
            os.write(connects, b".")
            rank.measure()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)


# In a rank


class _Elsewhere:
    """A store in another process, to which there is no connection yet."""

    def __init__(self, port: int) -> None:
        self.port = port

    def clone(self) -> dist.TCPStore:
        """The first connection."""
        limit = timedelta(seconds=_TIMEOUT_S)
        return dist.TCPStore("localhost", self.port, is_master=False, timeout=limit)


class _Rank:
    """One rank, with every arm over one connection."""

    def __init__(
        self,
        rank: int,
        world: int,
        port: int,
        keeper: int,
        fan_ins: Sequence[int],
        rounds: int,
        result: Path,
    ) -> None:
        self._rank = rank
        self._world = world
        self._keeper = keeper
        self._rounds = rounds
        self._result = result
        thread = StoreThread()
        own = self._store = thread.clone(_Elsewhere(port), timeout_s=_TIMEOUT_S)
        common = {"rank": rank, "world": world, "thread": thread, "timeout_s": _TIMEOUT_S}
        self._arms: dict[str, Meets] = {
            arm: Meetings(own, prefix=arm, fan_in=fan_in or world, **common)  # type: ignore[arg-type]
            for arm, fan_in in arms_of(fan_ins).items()
            if arm != _POLLED
        }
        polled = dist.PrefixStore(_POLLED, own)
        self._arms[_POLLED] = PolledStar(polled, **common)  # type: ignore[arg-type]
        self._voting = Voting(self._arms[_STAR])  # type: ignore[arg-type]

    def measure(self) -> None:
        """All rounds; rank 0 writes the figures."""
        dice = random.Random(self._world)  # the same order on every rank
        figures: Figures = {arm: {} for arm in self._arms}
        for number in range(-1, self._rounds):
            for arm in dice.sample(sorted(self._arms), len(self._arms)):
                found = self._one_round(f"{number}/{arm}", self._arms[arm])
                if number >= 0 and self._rank == 0:
                    for name, value in found.items():
                        figures[arm].setdefault(name, []).append(value)
        if self._rank == 0:
            self._result.write_text(json.dumps(figures))

    def _one_round(self, name: str, meetings: Meets) -> dict[str, float]:
        meet = partial(meetings.meet, "step() at step 1", self._vote(), merge=VOTES)
        for _ in range(_WARM_UP):
            meet()
        count = num_meetings(self._world)
        is_root = self._rank == 0
        before_s = time.process_time(), _cpu_s(self._keeper) if is_root else 0.0
        took_s = []
        for _ in range(count):
            began_s = time.perf_counter()
            meet()
            took_s.append(time.perf_counter() - began_s)
        own_us = (time.process_time() - before_s[0]) / count * 1e6
        store_us = (_cpu_s(self._keeper) - before_s[1]) / count * 1e6 if is_root else 0.0
        self._store.set(f"cpu/{name}/{self._rank}", str(own_us))
        between_us = self._between_us() if meetings is self._arms[_STAR] else None
        if not is_root:
            return {}
        keys = [f"cpu/{name}/{rank}" for rank in range(self._world)]
        return {
            "rank_cpu_us": statistics.median(float(us) for us in self._store.multi_get(keys)),
            "root_cpu_us": own_us,
            "store_cpu_us": store_us,
            "latency_ms": statistics.median(took_s) * 1e3,
            **({} if between_us is None else {"between_us": between_us}),
        }

    def _between_us(self) -> float:
        """A boundary between two meetings, as the ranks just agreed on them."""
        self._voting.agree("step() at step 1", self._vote, state=None)  # type: ignore[arg-type]
        began_s = time.perf_counter()
        for _ in range(_BOUNDARIES):
            self._voting.meets_at(302)
        return (time.perf_counter() - began_s) / _BOUNDARIES * 1e6

    def _vote(self) -> Vote:
        """As at a boundary with nothing to do."""
        durable = [(step, "0" * 32) for step in (100, 200, 300)] if self._rank == 0 else None
        costs = {"stall_s": 0.001 * self._rank, "cost_s": 0.01, "persist_s": 1.0}
        return Vote(
            Proposal(),
            is_ready=True,
            is_written=False,
            needs=Needs(1.0, 0.1),
            step=301,
            durable=durable,
            costs=costs,
            next_step=310,
        )


def _cpu_s(pid: int) -> float:
    """Processor time of all threads of a process, in seconds."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9
