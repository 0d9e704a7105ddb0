"""The killer of elastic runs: all ranks at once, at random instants, then another layout."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from iterators import EpochOrder, Ledger, Position
from iterators.order.ledger import ledger_of_range
from tests.fork_server import FORK_SERVER
from tests.iterators.elastic.program import Data, Life, run_rank, undisturbed

logger = logging.getLogger(__name__)

DEADLINE_S = 240.0

#: A rank reports that it runs and that it restored before it reports boundaries.
STARTING_REPORTS = 2


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to all ranks: ``delay_s`` after the ``reports``-th report of rank ``rank``.

    ``boundaries`` of these reports are of iteration boundaries.
    """

    rank: int
    reports: int
    boundaries: int
    delay_s: float


class Ranks:
    """The processes of one life. All of them are dead when the ``with`` block is left."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._pipes: list[Connection] = []
        self._aimed: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Ranks:
        try:
            for rank in range(self._life.world):
                self._start(rank)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in self._pipes:
            list(self._received(pipe))  # to its end: loader workers hold it open while they live
            pipe.close()
        for aimed in self._aimed:
            aimed.close()

    def wait_for(self, kill: Kill) -> None:
        """Return at the chosen instant, or when that rank came to its end before it."""
        reports = self._received(self._pipes[kill.rank])
        for _ in range(kill.reports):
            if next(reports, None) is None:
                process = self._processes[kill.rank]
                process.join(DEADLINE_S)
                assert process.exitcode == 0, f"rank {kill.rank} of {self._life} failed by itself"
                return
        time.sleep(kill.delay_s)  # the instant is meant to be a random one

    def kill(self) -> None:
        """SIGKILL every rank and its loader workers."""
        for process in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it does not lead a group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()

    def exit_codes(self) -> list[int | None]:
        """How the ranks ended, once they have."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            list(self._received(pipe))
            process.join(DEADLINE_S)
        return [process.exitcode for process in self._processes]

    def _start(self, rank: int) -> None:
        pipe, theirs = FORK_SERVER.Pipe(duplex=False)
        aimed_theirs, aimed = FORK_SERVER.Pipe(duplex=False)
        self._pipes.append(pipe)
        self._aimed.append(aimed)
        process = FORK_SERVER.Process(
            target=run_rank, args=(self._life, rank, theirs, aimed_theirs)
        )
        process.start()
        self._processes.append(process)
        theirs.close()
        aimed_theirs.close()

    @staticmethod
    def _received(pipe: Connection) -> Iterator[str]:
        while True:
            assert wait([pipe], timeout=DEADLINE_S), f"nothing happened for {DEADLINE_S} s"
            try:
                yield pipe.recv()
            except (EOFError, OSError):
                return


def require_killed_learns_the_same(data: Data, folder: Path, *, seed: int, kills: int) -> int:
    """Train in many lives, each at another layout, and compare; the kills that struck."""
    saved, struck = run_killed(data, folder, random.Random(seed), kills=kills)
    position, model = Position.from_dict(saved["position"]), saved["model"]
    assert (position.epoch, position.position) == (data.epochs, 0)
    assert model["counts"] == [[1] * data.n] * data.epochs
    ledgers = [Ledger.from_dict(one) for one in model["ledgers"]]
    assert ledgers == [ledger_of_range(data.n)] * data.epochs
    assert model == undisturbed_state(data)
    return struck


@cache
def undisturbed_state(data: Data) -> dict[str, Any]:
    """What one process learns that nobody kills; it runs here."""
    return undisturbed(data).state()


def run_killed(data: Data, folder: Path, dice: random.Random, *, kills: int) -> tuple[Any, int]:
    """The last checkpoint of a run in ``kills`` lives and one more, and the kills that struck."""
    struck = 0
    for number in range(kills):
        life = _drawn(data, folder, dice, number)
        kill = _planned(dice, life, kills_left=kills - number)
        with Ranks(replace(life, aim=kill.boundaries)) as ranks:
            ranks.wait_for(kill)
            ranks.kill()
            struck += -signal.SIGKILL in ranks.exit_codes()
        logger.info("%s, %s: step %s", life, kill, require_consistent(life))
    life = _drawn(data, folder, dice, kills)
    with Ranks(life) as ranks:
        assert set(ranks.exit_codes()) == {0}, life
    require_consistent(life)
    return json.loads(life.checkpoint.read_text()), struck


def require_consistent(life: Life) -> int | None:
    """What a life left: the model has learnt what its position says, no more and no less."""
    if not life.checkpoint.exists():
        return None
    saved = json.loads(life.checkpoint.read_text())
    position = Position.from_dict(saved["position"])
    for epoch, counts in enumerate(saved["model"]["counts"]):
        place = position.position if epoch == position.epoch else 0
        learnt = life.data.n if epoch < position.epoch else place
        order = EpochOrder(life.data.n, life.data.seed, epoch)
        ids = order.ids(range(learnt))
        assert counts == np.bincount(ids, minlength=life.data.n).tolist(), f"{life}, epoch {epoch}"
        if epoch == position.epoch:
            assert position.ledger == Ledger.of(ids), f"{life}, epoch {epoch}: the ledger"
    return position.step


def _planned(dice: random.Random, life: Life, *, kills_left: int) -> Kill:
    """Some kills come while ranks start; the others are spread over what is left to train."""
    starting = life.number > 0 and dice.random() < 0.25
    boundaries = 0 if starting else dice.randint(1, max(1, 2 * _left(life) // (kills_left + 1)))
    reports = dice.randint(0, STARTING_REPORTS) if starting else boundaries + STARTING_REPORTS
    return Kill(dice.randrange(life.world), reports, boundaries, dice.uniform(0.0, 0.03))


def _left(life: Life) -> int:
    """How many global batches are left, about."""
    data, done = life.data, 0
    if life.checkpoint.exists():
        position = json.loads(life.checkpoint.read_text())["position"]
        done = position["epoch"] * data.n + position["position"]
    return int(data.epochs * data.n - done) // (life.world * life.batch)


def _drawn(data: Data, folder: Path, dice: random.Random, number: int) -> Life:
    return Life(
        data,
        str(folder),
        number,
        world=dice.randint(1, 4),
        batch=dice.choice([1, 2] if data.images else [2, 3, 5]),
        workers=dice.randint(0, 2),
        checkpoint_every=dice.randint(1, 4),
    )
