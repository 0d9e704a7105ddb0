"""How ranks communicate: short meetings over the key-value store of torch.distributed.

Every rank says something, rank 0 decides, and all ranks receive the decision. Words go up a tree:
a rank joins those of its children with its own, so that no rank reads more than ``FAN_IN`` of them.
The decision is one message, for which every rank looks. A rank that does not arrive in
time is named on every rank; so is one that stops half way, and rank 0 if the store itself does not
answer. Meetings use no process group, so they cannot interleave with the collectives of the
training. They are held in the training thread, which has a ``StoreThread`` call the store.
``python -m benchmarks.ranks`` measures what one costs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch

from checkfreq import faults
from checkfreq.errors import ConfigError, RankError
from checkfreq.ranks import words
from checkfreq.ranks.line import Limits, Line, Pace
from checkfreq.ranks.merging import Join, Merge, if_none_failed, said_by_each, who
from checkfreq.ranks.rank_sets import names_of
from checkfreq.ranks.rendezvous import MAKING, agree_on_token
from checkfreq.ranks.store_thread import SilentStore, StoreThread
from checkfreq.ranks.tree import FAN_IN, Tree
from checkfreq.types import Json

logger = logging.getLogger(__name__)

T = TypeVar("T")

__all__ = ["Meetings", "ranks_of_process", "ranks_together"]

#: Numbers the managers of this process: every rank makes them in the same order.
_managers = count(1)

#: How long rank 0 waits, while closing, for the others to read its last reply: its process may
#: host the store, which is gone when it exits.
_FAREWELL_S = 5.0
#: How long to wait for the store when there is only something to write.
_NOTING_S = 1.0


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


def ranks_together(*, timeout_s: float) -> Meetings | None:
    """The meetings of this process's run; None for a run of one rank."""
    _, world = ranks_of_process()
    return None if world == 1 else Meetings.of_process_group(timeout_s=timeout_s)


class Meetings:
    """The meetings of one manager's ranks, which hold them in the same order.

    ``store`` holds the messages, below ``prefix``; only ``thread`` uses it. No rank waits longer
    than ``timeout_s`` for the others to arrive, nor longer than ``hurried_timeout_s`` once it was
    told to stop: launchers kill 30 s after the signal. ``fan_in``: the most children of a rank.
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
        prefix: str = "",
        fan_in: int = FAN_IN,
    ) -> None:
        self.rank = rank
        self.world = world
        #: The same on all ranks of these meetings, and of no others.
        self.name = prefix
        self.timeout_s = timeout_s
        self._hurried_s = min(timeout_s, hurried_timeout_s)
        #: Whether a stop signal was received: then waits are shorter.
        self.is_hurried: Callable[[], bool] = lambda: False
        self._thread = StoreThread() if thread is None else thread
        self._line = Line(store, prefix=prefix)
        self._words_come, self._decision_comes = Pace(world), Pace(world)
        self._tree = Tree(world, fan_in=fan_in)
        self._node = self._tree.node(rank)
        self._number = 0
        #: Whether somebody waits for this rank's word, or for its decision.
        self._owes = False
        self._broken = False
        self._over = False

    @classmethod
    def of_process_group(cls, *, timeout_s: float) -> Meetings:
        """Meetings of all ranks of the default process group, over a connection of their own."""
        distributed: Any = torch.distributed
        rank, world = distributed.get_rank(), distributed.get_world_size()
        default = distributed.distributed_c10d._get_default_store()
        return cls.over(default, rank=rank, world=world, timeout_s=timeout_s, fan_in=FAN_IN)

    @classmethod
    def over(
        cls, store: Any, *, rank: int, world: int, timeout_s: float, fan_in: int = FAN_IN
    ) -> Meetings:
        """Meetings over a connection of their own to the same store, once all ranks are there."""
        prefix, thread = f"checkfreq/{next(_managers)}", StoreThread()
        try:
            own = thread.clone(store, timeout_s=timeout_s)
            distributed: Any = torch.distributed
            below = distributed.PrefixStore(prefix, own)
            agree = partial(agree_on_token, below, rank=rank, world=world, timeout_s=timeout_s)
            token = thread.call(lambda is_wanted: agree(), patience_s=lambda: timeout_s)
        except (SilentStore, RuntimeError) as error:
            thread.stop()
            raise _without_store(error, rank=rank, phase=MAKING) from error
        except BaseException:
            thread.stop()
            raise
        return cls(
            own,
            rank=rank,
            world=world,
            timeout_s=timeout_s,
            thread=thread,
            prefix=f"{prefix}/{token}",
            fan_in=fan_in,
        )

    # ---- meeting

    def meet(self, phase: str, said: Json, *, merge: Merge) -> Json:
        """Say something, and receive what rank 0 decides from what all ranks said.

        ``merge`` says how; a ConfigError, StateError or RankError that its decision raises is
        raised on every rank. Raises RankError, naming the ranks, if some do not arrive, have left
        the run, or are in a different meeting.
        """
        self._number += 1
        faults.reach("meeting.say")
        self._owes = True
        try:
            own = {"phase": phase, "said": merge.of_one(self.rank, said)}
            reply = self._have_done(partial(self._take_part, self._number, own, merge))
        except RankError:
            self._broken = True
            raise
        except (SilentStore, RuntimeError) as error:
            self._broken = True
            raise _without_store(error, rank=self.rank, phase=phase) from error
        faults.reach("meeting.hear")
        if "error" in reply:
            agreed = words.raised(reply)
            self._broken = isinstance(agreed, RankError)
            raise agreed
        return reply["reply"]

    def act(self, phase: str, action: Callable[[], Json], *, merge: Merge = said_by_each) -> Json:
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
            reply = self.meet(phase, said, merge=if_none_failed(merge))
        except RankError as error:
            if failure is not None:
                raise failure from error
            raise
        if failure is not None:
            raise failure
        if "failed" in reply:
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in reply["failed"])
            ranks = [rank for rank, _ in reply["failed"]]
            raise RankError(f"{phase} failed on {texts}", ranks=ranks, phase=phase)
        return reply["done"]

    def until(
        self,
        phase: str,
        is_done: Callable[[float], bool],
        *,
        left_s: Callable[[float], float],
        what: str,
    ) -> None:
        """Meet again and again until ``is_done(seconds)`` is true on all ranks.

        ``is_done`` waits at most that long for its condition. ``left_s(seconds)``: how much longer
        to wait after so long. Then RankError names the ranks that still wait for ``what``.
        """
        began_s = time.monotonic()
        wait_s = min(1.0, self.timeout_s / 4)

        def decide(waiting: Sequence[int]) -> Json:
            waited_s = time.monotonic() - began_s
            if waiting and left_s(waited_s) <= 0:
                raise RankError(
                    f"{phase}: {names_of(waiting)} waited {waited_s:.0f} s for {what} in vain",
                    ranks=waiting,
                    phase=phase,
                )
            return not waiting

        while not self.act(phase, lambda: not is_done(wait_s), merge=who(decide)):
            pass

    def _have_done(
        self, action: Callable[[Callable[[], bool]], T], *, timeout_s: float | None = None
    ) -> T:
        """Run ``action`` in the store's thread, waiting as long as patience lasts."""
        patience_s = self.patience_s if timeout_s is None else lambda: timeout_s
        return self._thread.call(action, patience_s=patience_s)

    def patience_s(self) -> float:
        """How long to wait for others: less once told to stop, when a missing rank is gone."""
        return self._hurried_s if self.is_hurried() else self.timeout_s

    # ---- in the store's thread

    def _take_part(
        self, number: int, own: Json, merge: Merge, is_wanted: Callable[[], bool]
    ) -> Json:
        """Say something, join what the ranks below say, hand that up, and receive the decision."""
        phase = own["phase"]
        limits = Limits(time.monotonic(), self.patience_s, is_wanted)
        self._line.say(_own(number, self.rank), own)
        word = own
        if self._node.children:
            below = [_handed_up(number, block) for block in self._node.children]
            if not self._line.wait(below, self._words_come, limits):
                if not is_wanted():  # interrupted: the caller tells the others why this rank leaves
                    return None
                if missing := self._absent(number) - {self.rank}:
                    error = self._missing(missing, phase)
                    self._hand_on(number, words.lost(error), phase, merge)
                    raise error
            word = self._joined(number, merge.join)
        reply = self._hand_on(number, word, phase, merge)
        if reply is None:
            reply = self._line.wait_to_hear(_decision(number), self._decision_comes, limits)
            if reply is None:
                raise self._missing(self._absent(number) or {0}, phase)
        self._forget(number - 2)
        return reply

    def _joined(self, number: int, join: Join) -> Json:
        """The word of this rank and all below it."""
        blocks = (range(self.rank, self.rank + 1), *self._node.children)
        below = [_handed_up(number, block) for block in self._node.children]
        heard = self._line.hear([_own(number, self.rank), *below])
        return words.joined(list(zip(blocks, heard, strict=True)), join)

    def _hand_on(self, number: int, word: Json, phase: str, merge: Merge) -> Json:
        """Hand the word up; on rank 0, decide and reply. Returns the reply, None elsewhere."""
        reply = None
        if self.rank == 0:
            reply = words.reply(word, phase, merge.decide)
            self._line.say(_decision(number), reply)
        elif self._node.children:
            self._line.say(_handed_up(number, self._node.block), word)
        self._owes = False
        return reply

    def _forget(self, old: int) -> None:
        """Delete own messages of an old meeting: a rank that came to a later one has read them."""
        if old >= 1:
            for key in self._keys(old):
                self._line.forget(key)

    def _keys(self, number: int) -> list[str]:
        """Where this rank's messages of a meeting are."""
        keys = [_own(number, self.rank)]
        if self.rank == 0:
            keys.append(_decision(number))
        elif self._node.children:
            keys.append(_handed_up(number, self._node.block))
        return keys

    # ---- who is missing

    def _absent(self, number: int, rank: int = 0) -> set[int]:
        """The ranks because of which the word of one, or rank 0's decision, is not there.

        Those that did not come. A rank that came but hands nothing up, although it has all that
        it waits for, has stopped in the meeting. Empty if the word has come after all.
        """
        node = self._tree.node(rank)
        heads = {_handed_up(number, block): block.start for block in node.children}
        lacking = self._line.absent([*heads])
        found = set[int]().union(*(self._absent(number, heads[key]) for key in lacking))
        for word in self._line.hear([key for key in heads if key not in lacking]):
            if "lost" in word:  # whose own wait for those below is over
                found.update(word["lost"]["ranks"])
        if not self._line.are_there([_own(number, rank)]):
            return {rank, *found}
        handed = _decision(number) if rank == 0 else _handed_up(number, node.block)
        return found if found or self._line.are_there([handed]) else {rank}

    def _missing(self, absent: Iterable[int], phase: str) -> RankError:
        ranks = sorted(absent)
        return RankError(
            f"rank {self.rank} waited in {phase}: {names_of(ranks)} did not come within "
            f"{self.patience_s():g} s (CFConfig.rank_timeout_s): lost, or "
            "doing something else. Making the CFManager, step(), save(), restore(), wait(), "
            "finish() and close() are for all ranks together",
            ranks=ranks,
            phase=phase,
        )

    # ---- leaving

    def leave(self, why: str) -> None:
        """Leave the run: the next meeting of the others raises at once instead of waiting."""
        if self._over:
            return
        self._over = True

        def part(is_wanted: Callable[[], bool]) -> None:
            self._say_left(self._number + (not self._owes), why)

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
                self._say_left(self._number, "it closed its manager")
                return
            self._line.wait(
                [_own(self._number, rank) for rank in range(1, self.world)],
                Pace(self.world),
                Limits(time.monotonic(), lambda: timeout_s, is_wanted),
            )

        self._part(part, timeout_s=timeout_s)

    def _say_left(self, number: int, why: str) -> None:
        """To whoever waits for this rank in a meeting: it has left."""
        if self.rank == 0:
            error = RankError(f"rank 0 left the run: {why}", ranks=[0], phase="any")
            self._line.say(_decision(number), words.of_error(error))
            return
        for key in self._keys(number):
            self._line.say(key, words.left(self.rank, why))

    def _part(self, action: Callable[[Callable[[], bool]], None], *, timeout_s: float) -> None:
        """Make the last call to the store, and end its thread."""
        try:
            self._have_done(action, timeout_s=timeout_s)
        except (SilentStore, RuntimeError):
            logger.debug("some ranks may not have read the last message", exc_info=True)
        finally:
            self._thread.stop()


def _own(number: int, rank: int) -> str:
    """Where a rank's own words are: the sign that it came."""
    return f"{number}/{rank}"


def _handed_up(number: int, block: range) -> str:
    """Where the word of a block of ranks is: of one that heads no others, what it said itself."""
    return _own(number, block.start) + "+" * (len(block) > 1)


def _decision(number: int) -> str:
    return f"{number}/all"


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
