"""How ranks communicate: short meetings over the key-value store of torch.distributed.

Every rank says something, rank 0 decides, and all ranks receive the decision. A rank that does not
arrive in time is named on every rank; so is rank 0 if the store itself does not answer. Meetings
use no process group, so they cannot interleave with the collectives of the training. They are held
in the training thread, which has a ``StoreThread`` call the store. ``python -m benchmarks.sharded
--only meeting`` measures what one costs.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch

from checkfreq import faults
from checkfreq.errors import CheckFreqError, ConfigError, RankError, StateError
from checkfreq.ranks.rendezvous import MAKING, agree_on_token, names_of
from checkfreq.ranks.store_thread import SilentStore, StoreThread
from checkfreq.types import Json

logger = logging.getLogger(__name__)

T = TypeVar("T")

__all__ = ["Meetings", "ranks_of_process", "ranks_together", "said_by_each"]

#: Numbers the managers of this process: every rank makes them in the same order.
_managers = count(1)

#: How long rank 0 waits, while closing, for the others to read its last reply: its process may
#: host the store, which is gone when it exits.
_FAREWELL_S = 5.0
#: How long to wait for the store when there is only something to write.
_NOTING_S = 1.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 0.05

#: Errors that a decision raises on every rank, by their names in a reply.
_AGREED: Mapping[str, type[CheckFreqError]] = {"ConfigError": ConfigError, "StateError": StateError}

Decide = Callable[[Sequence[Json]], Json]


def ranks_of_process() -> tuple[int, int]:
    """Rank and world size of this process: (0, 1) if it trains alone.

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
    """Decides nothing: every rank receives what each rank said."""
    return list(said)


def ranks_together(*, timeout_s: float) -> Meetings | None:
    """The meetings of this process's run; None for a run of one rank."""
    _, world = ranks_of_process()
    return None if world == 1 else Meetings.of_process_group(timeout_s=timeout_s)


class Meetings:
    """The meetings of one manager's ranks, which hold them in the same order.

    ``store`` holds the messages; only ``thread`` uses it. No rank waits longer than ``timeout_s``
    for the others to arrive, nor longer than ``hurried_timeout_s`` once it was told to stop:
    launchers kill 30 s after the signal.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world: int,
        timeout_s: float,
        hurried_timeout_s: float = 15.0,
        thread: StoreThread | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.timeout_s = timeout_s
        self._hurried_s = min(timeout_s, hurried_timeout_s)
        #: Whether a stop signal was received: then waits are shorter.
        self.is_hurried: Callable[[], bool] = lambda: False
        self._store = store
        self._thread = StoreThread() if thread is None else thread
        self._number = 0
        self._owes_reply = False
        self._broken = False
        self._over = False

    @classmethod
    def of_process_group(cls, *, timeout_s: float) -> Meetings:
        """Meetings of all ranks of the default process group, over a connection of their own."""
        distributed: Any = torch.distributed
        rank, world = distributed.get_rank(), distributed.get_world_size()
        prefix, thread = f"checkfreq/{next(_managers)}", StoreThread()
        default = distributed.distributed_c10d._get_default_store()
        try:
            store = thread.clone(default, timeout_s=timeout_s)
            store = distributed.PrefixStore(prefix, store)
            agree = partial(agree_on_token, store, rank=rank, world=world, timeout_s=timeout_s)
            token = thread.call(lambda is_wanted: agree(), patience_s=lambda: timeout_s)
        except (SilentStore, RuntimeError) as error:
            thread.stop()
            raise _without_store(error, rank=rank, phase=MAKING) from error
        except BaseException:
            thread.stop()
            raise
        store = distributed.PrefixStore(token, store)
        return cls(store, rank=rank, world=world, timeout_s=timeout_s, thread=thread)

    # ---- meeting

    def meet(self, phase: str, said: Json, *, decide: Decide) -> Json:
        """Say something, and receive what rank 0 decides from what all ranks said, in rank order.

        ``decide`` runs on rank 0; a ConfigError, StateError or RankError that it raises is raised
        on every rank. Raises RankError, naming the ranks, if some do not arrive, have left the run,
        or are in a different meeting.
        """
        self._number += 1
        faults.reach("meeting.say")
        try:
            words = {"phase": phase, "said": said}
            take_part = partial(self._preside, decide) if self.rank == 0 else self._attend
            reply = self._have_done(partial(take_part, self._number, words))
        except RankError:
            self._broken = True
            raise
        except (SilentStore, RuntimeError) as error:
            self._broken = True
            raise _without_store(error, rank=self.rank, phase=phase) from error
        faults.reach("meeting.hear")
        if "error" in reply:
            agreed = _raised(reply)
            self._broken = isinstance(agreed, RankError)
            raise agreed
        return reply["reply"]

    def act(self, phase: str, action: Callable[[], Json], *, decide: Decide = said_by_each) -> Json:
        """Do something on every rank, then meet; a failure on one rank is an error on all.

        The rank on which ``action`` raised raises the same error; the others raise a RankError
        with its text.
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

    def _have_done(
        self, action: Callable[[Callable[[], bool]], T], *, timeout_s: float | None = None
    ) -> T:
        """Run ``action`` in the store's thread, waiting as long as patience lasts."""
        patience_s = self._patience_s if timeout_s is None else lambda: timeout_s
        return self._thread.call(action, patience_s=patience_s)

    def _patience_s(self) -> float:
        """How long to wait for others: less once told to stop, when a missing rank is gone."""
        return self._hurried_s if self.is_hurried() else self.timeout_s

    # ---- in the store's thread

    def _preside(
        self, decide: Decide, number: int, words: Json, is_wanted: Callable[[], bool]
    ) -> Json:
        """Rank 0's part: collect what all ranks say, decide, reply."""
        phase = words["phase"]
        self._owes_reply = True
        self._say(number, self.rank, words)
        missing = self._wait_for(number, range(self.world), is_wanted)
        if not is_wanted():  # interrupted: the caller tells the others why this rank leaves
            return None
        if missing:
            error = self._missing(missing, phase)
            self._answer(number, _of_error(error))
            raise error
        reply = self._decided(phase, self._hear_each(number), decide)
        self._answer(number, reply)
        self._forget(number - 2)
        return reply

    def _attend(self, number: int, words: Json, is_wanted: Callable[[], bool]) -> Json:
        """Any other rank's part: say something, and receive the decision."""
        self._say(number, self.rank, words)
        if self._wait_for(number, ["all"], is_wanted):
            missing = [rank for rank in range(self.world) if not self._is_there(number, rank)]
            raise self._missing(missing or [0], words["phase"])
        reply = self._hear(number, "all")
        self._forget(number - 2)
        return reply

    def _answer(self, number: int, reply: Json) -> None:
        self._say(number, "all", reply)
        self._owes_reply = False

    def _forget(self, old: int) -> None:
        """Delete own messages of an old meeting: a rank that came to a later one has read them."""
        if old >= 1:
            self._store.delete_key(f"{old}/{self.rank}")
            if self.rank == 0:
                self._store.delete_key(f"{old}/all")

    def _say(self, number: int, key: object, words: Json) -> None:
        self._store.set(f"{number}/{key}", json.dumps(words))

    def _hear(self, number: int, key: object) -> Json:
        return json.loads(self._store.get(f"{number}/{key}"))

    def _hear_each(self, number: int) -> list[Json]:
        if not self._store.has_extended_api():
            return [self._hear(number, rank) for rank in range(self.world)]
        names = [f"{number}/{rank}" for rank in range(self.world)]
        return [json.loads(words) for words in self._store.multi_get(names)]

    def _wait_for(
        self,
        number: int,
        keys: Sequence[object],
        is_wanted: Callable[[], bool],
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Wait until all keys are there; returns the keys that are missing at the deadline.

        Polls at growing pauses, a quarter of the time waited so far, so that it never waits much
        longer than necessary. The store's own wait could not be cut short by a stop signal.
        """
        names = [f"{number}/{key}" for key in keys]
        start_s = time.monotonic()
        while not self._store.check(names):
            waited_s = time.monotonic() - start_s
            patience_s = self._patience_s() if timeout_s is None else timeout_s
            if waited_s >= patience_s or not is_wanted():
                return [key for key in keys if not self._is_there(number, key)]
            time.sleep(min(max(waited_s / 4, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))
        return []

    def _is_there(self, number: int, key: object) -> bool:
        return bool(self._store.check([f"{number}/{key}"]))

    # ---- replies and errors

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

    def _missing(self, ranks: Sequence[int], phase: str) -> RankError:
        return self._lost(
            ranks,
            phase,
            f"did not come within {self._patience_s():g} s (CFConfig.rank_timeout_s): lost, or "
            "doing something else. Making the CFManager, step(), save(), restore(), wait(), "
            "finish() and close() are for all ranks together",
        )

    def _lost(self, ranks: Sequence[int], phase: str, why: str) -> RankError:
        where = f"rank {self.rank} waited in {phase}"
        return RankError(f"{where}: {names_of(ranks)} {why}", ranks=ranks, phase=phase)

    # ---- leaving

    def leave(self, why: str) -> None:
        """Leave the run: the next meeting of the others raises at once instead of waiting."""
        if self._over:
            return
        self._over = True

        def part(is_wanted: Callable[[], bool]) -> None:
            number = self._number + (not self._owes_reply)
            if self.rank == 0:
                error = RankError(f"rank 0 left the run: {why}", ranks=[0], phase="any")
                self._say(number, "all", _of_error(error))
            else:
                self._say(number, self.rank, {"left": why})

        self._part(part, timeout_s=_NOTING_S)

    def close(self) -> None:
        """After the last meeting: rank 0 waits a while until the others have read its reply."""
        if self._over or self._broken:
            self._thread.stop()
            return
        self._over = True
        self._number += 1
        timeout_s = min(_FAREWELL_S, self.timeout_s)

        def part(is_wanted: Callable[[], bool]) -> None:
            if self.rank != 0:
                self._say(self._number, self.rank, {"left": "it closed its manager"})
            else:
                self._wait_for(self._number, range(1, self.world), is_wanted, timeout_s)

        self._part(part, timeout_s=timeout_s)

    def _part(self, action: Callable[[Callable[[], bool]], None], *, timeout_s: float) -> None:
        """Make the last call to the store, and end its thread."""
        try:
            self._have_done(action, timeout_s=timeout_s)
        except (SilentStore, RuntimeError):
            logger.debug("some ranks may not have read the last message", exc_info=True)
        finally:
            self._thread.stop()


def _without_store(error: Exception, *, rank: int, phase: str) -> RankError:
    """``rank`` has no answer: the process that hosts the store is gone, hangs or is unreachable."""
    keeper = (
        f"the store of torch.distributed, which rank 0 or a launcher beside it keeps: {error}. "
        "Its process has ended or hangs, or its node is lost"
    )
    ranks = [0] if rank else []
    who = "rank 0 did not come" if rank else "nobody can be heard"
    return RankError(
        f"rank {rank} waited in {phase}: {who}, without {keeper}", ranks=ranks, phase=phase
    )


def _if_none_failed(said: Sequence[Json], decide: Decide) -> Json:
    failed = {rank: words["failed"] for rank, words in enumerate(said) if "failed" in words}
    return {"failed": failed} if failed else {"done": decide([words["done"] for words in said])}


def _apart(phase: str, phases: Sequence[str]) -> RankError:
    others = [rank for rank, other in enumerate(phases) if other != phase]
    where = "; ".join(f"rank {rank} is in {phases[rank]}" for rank in others)
    return RankError(
        f"the ranks do different things: rank 0 is in {phase}, {where}. step(), save(), restore(), "
        "wait(), finish() and close() are for all ranks together, in the same order",
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
