"""Meetings as they were before they were a tree: the arm to compare with.

Rank 0 reads every rank's words, and every rank polls one key for the decision. Polls come at
pauses that grow by a quarter of the time waited so far.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from checkfreq.ranks.merging import Merge
from checkfreq.ranks.store_thread import StoreThread
from checkfreq.types import Json

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 0.05


class PolledStar:
    """The meetings of one rank."""

    def __init__(
        self, store: Any, *, rank: int, world: int, thread: StoreThread, timeout_s: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._thread = thread
        self._timeout_s = timeout_s
        self._number = 0

    def meet(self, phase: str, said: Json, *, merge: Merge) -> Json:
        """Say something, and receive what rank 0 decides."""
        self._number += 1
        words = {"phase": phase, "said": merge.of_one(self._rank, said)}
        take_part = partial(self._preside, merge) if self._rank == 0 else self._attend
        return self._thread.call(partial(take_part, words), patience_s=lambda: self._timeout_s)[
            "reply"
        ]

    def _preside(self, merge: Merge, words: Json, is_wanted: Callable[[], bool]) -> Json:
        self._say(str(self._rank), words)
        names = [f"{self._number}/{rank}" for rank in range(self._world)]
        self._wait_for(names)
        heard = [json.loads(words) for words in self._store.multi_get(names)]
        reply = {"reply": merge.decide(merge.join([words["said"] for words in heard]))}
        self._say("all", reply)
        self._forget()
        return reply

    def _attend(self, words: Json, is_wanted: Callable[[], bool]) -> Json:
        self._say(str(self._rank), words)
        self._wait_for([f"{self._number}/all"])
        reply = json.loads(self._store.get(f"{self._number}/all"))
        self._forget()
        return reply

    def _say(self, key: str, words: Json) -> None:
        self._store.set(f"{self._number}/{key}", json.dumps(words))

    def _wait_for(self, names: list[str]) -> None:
        start_s = time.monotonic()
        while not self._store.check(names):
            waited_s = time.monotonic() - start_s
            if waited_s > self._timeout_s:
                raise TimeoutError(f"rank {self._rank} waited in vain")
            time.sleep(min(max(waited_s / 4, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S))

    def _forget(self) -> None:
        if (old := self._number - 2) >= 1:
            self._store.delete_key(f"{old}/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(f"{old}/all")
