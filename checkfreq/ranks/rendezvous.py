"""How ranks find one another in a store that may still hold keys of an earlier start.

After an elastic restart the launcher's store is the same, and so are the keys. So rank 0 publishes
a fresh token, every rank answers it with a random number, and a rank that finds its number in rank
0's list knows that the token belongs to this start: it becomes a prefix of every later key.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from checkfreq.errors import RankError
from checkfreq.ranks.line import absent
from checkfreq.ranks.rank_sets import names_of

#: The phase in which managers are made.
MAKING = "making the CFManager"
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.05
#: While ranks wait for one another, all of them together look at the store no more often.
_MOST_LOOKS_PER_S = 2000.0


def agree_on_token(store: Any, *, rank: int, world: int, timeout_s: float) -> str:
    """A text that all ranks of this start share, and no earlier start had.

    Raises RankError, naming them, for ranks that do not come within ``timeout_s``.
    """
    host = _Rank0(store, world) if rank == 0 else _Member(store, rank, world)
    end_s, wait_s = time.monotonic() + timeout_s, _FIRST_WAIT_S
    longest_s = max(_LONGEST_WAIT_S, world / _MOST_LOOKS_PER_S)
    while (token := host.token()) is None:
        if time.monotonic() >= end_s:
            raise _missing(host.missing(), rank, timeout_s)
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, longest_s)
    return token


class _Rank0:
    def __init__(self, store: Any, world: int) -> None:
        self._store = store
        self._token = uuid.uuid4().hex
        self._others = range(1, world)
        self._num_seen = 0
        store.set("round", self._token)

    def token(self) -> str | None:
        """The token, once all have answered it."""
        for rank in self._others[self._num_seen :]:  # in turn: one question while one is late
            if not _answers(self._store, self._token, [rank]):
                return None
            self._num_seen += 1
        numbers = _answers(self._store, self._token, self._others)  # the newest of each
        if len(numbers) < len(self._others):
            self._num_seen = 0
            return None
        self._store.set(f"go/{self._token}", json.dumps(numbers))
        return self._token

    def missing(self) -> list[int]:
        there = _answers(self._store, self._token, self._others)
        return [rank for rank in self._others if str(rank) not in there]


class _Member:
    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._number = uuid.uuid4().hex
        self._answered = ""

    def token(self) -> str | None:
        """The token, once rank 0 lists this process's number under it."""
        if not self._store.check(["round"]):
            return None
        token = self._store.get("round").decode()
        if token != self._answered:
            self._store.set(f"answer/{self._rank}", json.dumps([token, self._number]))
            self._answered = token
        if not self._store.check([f"go/{token}"]):
            return None
        numbers = json.loads(self._store.get(f"go/{token}"))
        return token if numbers.get(str(self._rank)) == self._number else None

    def missing(self) -> list[int]:
        others = range(1, self._world)
        there = _answers(self._store, self._answered, others)
        return [rank for rank in others if str(rank) not in there] if there else [0]


def _answers(store: Any, token: str, ranks: Sequence[int]) -> dict[str, str]:
    """The numbers of those of the ranks that answered the token, by rank."""
    keys = {f"answer/{rank}": str(rank) for rank in ranks}
    lacking = {*absent(store.check, [*keys])}
    there = [key for key in keys if key not in lacking]
    if len(there) > 1 and store.has_extended_api():
        values = store.multi_get(there)
    else:
        values = [store.get(key) for key in there]
    answers = {keys[key]: json.loads(value) for key, value in zip(there, values, strict=True)}
    return {rank: number for rank, (answered, number) in answers.items() if answered == token}


def _missing(ranks: Sequence[int], rank: int, timeout_s: float) -> RankError:
    missing = list(ranks) or [0]
    return RankError(
        f"rank {rank} waited in {MAKING}: {names_of(missing)} did not come within {timeout_s:g} s "
        "(CFConfig.rank_timeout_s): lost, or doing something else. Every rank makes a CFManager, "
        "in the same order",
        ranks=missing,
        phase=MAKING,
    )
