"""How the ranks of a run talk: short meetings over the key-value store of torch.distributed.

Each rank says something, rank 0 decides, and all hear the decision; who does not come in time is
named on every rank. No process group and no collective of the training's is used, so nothing
can cross with its own communication; no meeting is held outside the training thread. What one
costs is measured by ``benchmarks/sharded.py --only meeting``.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from checkfreq import faults
from checkfreq.distributed.rendezvous import MAKING, agree_on_token, names_of
from checkfreq.errors import CheckFreqError, ConfigError, RankError, StateError
from checkfreq.types import Json

logger = logging.getLogger(__name__)

__all__ = ["Meetings", "ranks_of_process", "ranks_together", "said_by_each"]

#: Managers made so far in this process: every rank makes them in the same order.
_managers = count(1)

#: How long rank 0 stays for the others to hear its last words: it may keep the store.
_FAREWELL_S = 5.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 0.05

#: Errors on which all ranks agree, by the name in a reply.
_AGREED: Mapping[str, type[CheckFreqError]] = {"ConfigError": ConfigError, "StateError": StateError}

Decide = Callable[[Sequence[Json]], Json]


def ranks_of_process() -> tuple[int, int]:
    """Rank and world of this process: (0, 1) when it is alone.

    Raises ConfigError if it was launched as one of several, and they are not connected yet.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched.isdecimal() and int(launched) > 1:
        raise ConfigError(
            f"launched as one of WORLD_SIZE={launched} ranks, but torch.distributed is not "
            "initialised: call torch.distributed.init_process_group() before CFManager(...), or "
            "unset WORLD_SIZE if this process trains alone"
        )
    return 0, 1


def said_by_each(said: Sequence[Json]) -> Json:
    """A decision that is no decision: everybody hears what everybody said."""
    return list(said)


def ranks_together(*, timeout_s: float) -> Meetings | None:
    """The meetings of this process's run; None if it is alone."""
    _, world = ranks_of_process()
    return None if world == 1 else Meetings.of_process_group(timeout_s=timeout_s)


class Meetings:
    """The meetings of one manager's ranks, held in the same order by all of them.

    ``store`` keeps the words. No rank waits longer than ``timeout_s`` for the others to come, nor
    than ``hurried_timeout_s`` once it was told to stop: launchers kill 30 s after that.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world: int,
        timeout_s: float,
        hurried_timeout_s: float = 15.0,
    ) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self._hurried_s = min(timeout_s, hurried_timeout_s)
        #: Whether a stop signal came: then there is less time for the others.
        self.is_hurried: Callable[[], bool] = lambda: False
        self._store = store
        self._number = 0
        self._owes_reply = False
        self._broken = False
        self._over = False

    @classmethod
    def of_process_group(cls, *, timeout_s: float) -> Meetings:
        """Meetings of all ranks of the default process group, beside its own traffic."""
        distributed: Any = torch.distributed
        rank, world = distributed.get_rank(), distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store().clone()
        store = distributed.PrefixStore(f"checkfreq/{next(_managers)}", store)
        try:
            token = agree_on_token(store, rank=rank, world=world, timeout_s=timeout_s)
        except RuntimeError as error:  # the store's: its keeper is gone
            text = f"{MAKING}: the store that rank 0 keeps is gone: {error}"
            raise RankError(text, ranks=[0], phase=MAKING) from error
        store = distributed.PrefixStore(token, store)
        return cls(store, rank=rank, world=world, timeout_s=timeout_s)

    # ---- meeting

    def meet(self, phase: str, said: Json, *, decide: Decide) -> Json:
        """Say something, and hear what rank 0 decides from what all ranks said, in their order.

        ``decide`` runs on rank 0; a ConfigError, StateError or RankError that it raises is raised
        on every rank. Raises RankError, naming them, if ranks do not come, have left, or came to
        another meeting.
        """
        self._number += 1
        faults.reach("meeting.say")
        try:
            self._say(self.rank, {"phase": phase, "said": said})
            reply = self._preside(phase, decide) if self.rank == 0 else self._attend(phase)
            self._forget()
        except RankError:
            self._broken = True
            raise
        except RuntimeError as error:  # the store's: its keeper is gone
            self._broken = True
            raise self._lost([0], phase, f"keeps a store that is gone: {error}") from error
        faults.reach("meeting.hear")
        if "error" in reply:
            agreed = _raised(reply)
            self._broken = isinstance(agreed, RankError)
            raise agreed
        return reply["reply"]

    def act(self, phase: str, action: Callable[[], Json], *, decide: Decide = said_by_each) -> Json:
        """Do something on every rank, then meet; if it failed on one, it is an error on all.

        The rank on which ``action`` raised raises that; the others a RankError with its words.
        """
        failure: Exception | None = None
        try:
            said = {"done": action()}
        except Exception as error:
            said, failure = {"failed": f"{type(error).__name__}: {error}"}, error
        try:
            reply = self.meet(phase, said, decide=lambda words: _if_none_failed(words, decide))
        except RankError as error:
            if failure is not None:
                raise failure from error
            raise
        if failure is not None:
            raise failure
        if "failed" in reply:
            failed = {int(rank): text for rank, text in reply["failed"].items()}
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise RankError(f"{phase} failed on {texts}", ranks=list(failed), phase=phase)
        return reply["done"]

    def until(
        self, phase: str, is_done: Callable[[float], bool], *, timeout_s: float, what: str
    ) -> None:
        """Meet again and again until ``is_done(seconds)`` is true on all ranks.

        ``is_done`` waits at most that long for its condition. Raises RankError after
        ``timeout_s``, naming the ranks that still wait for ``what``.
        """
        end_s = time.monotonic() + timeout_s
        wait_s = min(1.0, self.timeout_s / 4)

        def decide(done: Sequence[Json]) -> Json:
            waiting = [rank for rank, is_one_done in enumerate(done) if not is_one_done]
            if waiting and time.monotonic() >= end_s:
                raise RankError(
                    f"{phase}: {names_of(waiting)} waited {timeout_s:.0f} s for {what} in vain",
                    ranks=waiting,
                    phase=phase,
                )
            return not waiting

        while not self.act(phase, lambda: is_done(wait_s), decide=decide):
            pass

    def _say(self, key: object, words: Json) -> None:
        self._store.set(f"{self._number}/{key}", json.dumps(words))

    def _hear(self, key: object) -> Json:
        return json.loads(self._store.get(f"{self._number}/{key}"))

    def _preside(self, phase: str, decide: Decide) -> Json:
        self._owes_reply = True
        if missing := self._wait_for(range(self.world)):
            error = self._missing(missing, phase)
            self._answer(_of_error(error))
            raise error
        reply = self._decided(phase, self._hear_each(), decide)
        self._answer(reply)
        return reply

    def _answer(self, reply: Json) -> None:
        self._say("all", reply)
        self._owes_reply = False

    def _hear_each(self) -> list[Json]:
        if not self._store.has_extended_api():
            return [self._hear(rank) for rank in range(self.world)]
        names = [f"{self._number}/{rank}" for rank in range(self.world)]
        return [json.loads(words) for words in self._store.multi_get(names)]

    def _attend(self, phase: str) -> Json:
        if self._wait_for(["all"]):
            missing = [rank for rank in range(self.world) if not self._is_there(rank)]
            raise self._missing(missing or [0], phase)
        return self._hear("all")

    def _wait_for(self, keys: Sequence[object], timeout_s: float | None = None) -> list[Any]:
        """Wait for what others say; returns who has said nothing at the deadline.

        Looks ever less often, but never waits much longer than it would have had to. The store's
        own wait would keep signals from being handled, and not be told of a hurry.
        """
        names = [f"{self._number}/{key}" for key in keys]
        start_s = time.monotonic()
        while not self._store.check(names):
            waited_s = time.monotonic() - start_s
            if waited_s >= (self._patience_s() if timeout_s is None else timeout_s):
                return [key for key in keys if not self._is_there(key)]
            time.sleep(min(max(waited_s / 4, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
        return []

    def _patience_s(self) -> float:
        """A run that was told to stop has no time for a rank that is most likely gone."""
        return self._hurried_s if self.is_hurried() else self.timeout_s

    def _is_there(self, key: object) -> bool:
        return bool(self._store.check([f"{self._number}/{key}"]))

    def _decided(self, phase: str, words: Sequence[Json], decide: Decide) -> Json:
        try:
            if gone := {rank: word["left"] for rank, word in enumerate(words) if "left" in word}:
                texts = "; ".join(f"rank {rank} left the run: {why}" for rank, why in gone.items())
                raise RankError(f"{phase}: {texts}", ranks=list(gone), phase=phase)
            if len({word["phase"] for word in words}) > 1:
                raise _apart(phase, [word["phase"] for word in words])
            return {"reply": decide([word["said"] for word in words])}
        except (ConfigError, StateError, RankError) as error:
            return _of_error(error)

    def _forget(self) -> None:
        """Remove own words that everybody has heard: whoever came here heard those before."""
        old = self._number - 2
        if old >= 1:
            self._store.delete_key(f"{old}/{self.rank}")
            if self.rank == 0:
                self._store.delete_key(f"{old}/all")

    def _missing(self, ranks: Sequence[int], phase: str) -> RankError:
        return self._lost(
            ranks,
            phase,
            f"did not come within {self._patience_s():g} s (CFConfig.rank_timeout_s): lost, or "
            "doing something else. Making the CFManager, step(), save(), restore(), wait() and "
            "close() are for all ranks together",
        )

    def _lost(self, ranks: Sequence[int], phase: str, why: str) -> RankError:
        where = f"rank {self.rank} waited in {phase}"
        return RankError(f"{where}: {names_of(ranks)} {why}", ranks=ranks, phase=phase)

    # ---- leaving

    def leave(self, why: str) -> None:
        """Tell the others not to wait for this rank: their next meeting raises at once."""
        if self._over:
            return
        self._over = True
        self._number += not self._owes_reply
        try:
            if self.rank == 0:
                error = RankError(f"rank 0 left the run: {why}", ranks=[0], phase="any")
                self._say("all", _of_error(error))
            else:
                self._say(self.rank, {"left": why})
        except RuntimeError:
            logger.debug("nobody is left to be told", exc_info=True)

    def close(self) -> None:
        """After the last meeting: rank 0 stays until the others have heard it, for a while."""
        if self._over or self._broken:
            return
        self._over = True
        self._number += 1
        try:
            if self.rank != 0:
                self._say(self.rank, {"left": "it closed its manager"})
                return
            self._wait_for(range(1, self.world), min(_FAREWELL_S, self.timeout_s))
        except RuntimeError:
            logger.debug("not everybody said good-bye", exc_info=True)


def _if_none_failed(said: Sequence[Json], decide: Decide) -> Json:
    failed = {rank: words["failed"] for rank, words in enumerate(said) if "failed" in words}
    return {"failed": failed} if failed else {"done": decide([words["done"] for words in said])}


def _apart(phase: str, phases: Sequence[str]) -> RankError:
    others = [rank for rank, other in enumerate(phases) if other != phase]
    where = "; ".join(f"rank {rank} is in {phases[rank]}" for rank in others)
    return RankError(
        f"the ranks do different things: rank 0 is in {phase}, {where}. step(), save(), restore(), "
        "wait() and close() are for all ranks together, in the same order",
        ranks=others,
        phase=phase,
    )


def _of_error(error: CheckFreqError) -> Json:
    ranks = list(error.ranks) if isinstance(error, RankError) else []
    phase = error.phase if isinstance(error, RankError) else ""
    return {"error": type(error).__name__, "text": str(error), "ranks": ranks, "phase": phase}


def _raised(reply: Json) -> CheckFreqError:
    kind = _AGREED.get(reply["error"])
    if kind is not None:
        return kind(reply["text"])
    return RankError(reply["text"], ranks=reply["ranks"], phase=reply["phase"])
