"""A rank's line to the store: messages under keys, and the wait for those of others.

Belongs to the thread that calls the store. Nothing here knows what is said. A wait polls: the
store's own wait could not be cut short by a stop signal, and where it times out torch looks up
host names for its warning, for seconds if no name server answers (2.13).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from checkfreq.types import Json

T = TypeVar("T")

#: No message: a store that is told to replace this by this only says what it has.
_NOTHING = "?"
_SHORTEST_PAUSE_S = 5e-5
#: The longest pause: however many ranks there are, while they wait for one that is late they look
#: at the store at most so often together, as long as a stop signal is noticed in time.
_LONGEST_PAUSE_S, _MOST_LOOKS_PER_S, _NOTICED_S = 0.05, 2000.0, 0.5
#: The first look comes after this part of the shortest of so many last waits, but no later than the
#: first of these, or so much for each rank: a meeting takes the store a third of that (2 cores).
_PART, _WINDOW, _FIRST_LOOK_S, _FIRST_LOOK_A_RANK_S = 0.8, 8, 0.01, 3e-4
#: With up to so many ranks, looks cost the store little, and come at once.
_FEW = 17


class Pace:
    """When to look for what one waits for, meeting after meeting. Seconds."""

    def __init__(self, world: int) -> None:
        longest_s = max(_LONGEST_PAUSE_S, world / _MOST_LOOKS_PER_S)
        self._longest_s = min(longest_s, _NOTICED_S)
        self.looks_at_once = world <= _FEW
        latest_s = max(_FIRST_LOOK_S, world * _FIRST_LOOK_A_RANK_S)
        self._latest_s = 0.0 if self.looks_at_once else latest_s
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def pause_s(self, waited_s: float) -> float:
        """How long to pause before the next look, having waited so long.

        A quarter of that, so that no wait becomes much longer than necessary; and of many ranks,
        not before it can be over, since a look takes the store as long as a message.
        """
        first_s = min(_PART * min(self._last, default=0.0), self._latest_s)
        pause_s = max(waited_s / 4, first_s - waited_s, _SHORTEST_PAUSE_S)
        return min(pause_s, self._longest_s)

    def took(self, seconds: float) -> None:
        """A wait was over after that."""
        self._last.append(seconds)


class Limits(NamedTuple):
    """A wait is over once ``patience_s()`` has passed since ``since_s``, on the monotonic clock, or
    once it is not wanted any more.
    """

    since_s: float
    patience_s: Callable[[], float]
    is_wanted: Callable[[], bool]


class Line:
    """Messages in ``store``, below ``prefix``."""

    def __init__(self, store: Any, *, prefix: str = "") -> None:
        self._store = store
        self._prefix = prefix and f"{prefix}/"

    def say(self, key: str, words: Json) -> None:
        """Leave a message."""
        self._store.set(self._prefix + key, json.dumps(words))

    def hear(self, keys: Sequence[str]) -> list[Json]:
        """The messages under keys that are there."""
        names = self._names(keys)
        if len(names) > 1 and self._store.has_extended_api():
            return [json.loads(words) for words in self._store.multi_get(names)]
        return [json.loads(self._store.get(name)) for name in names]

    def forget(self, key: str) -> None:
        """Remove a message, if it is there."""
        self._store.delete_key(self._prefix + key)

    def are_there(self, keys: Iterable[str]) -> bool:
        """Whether all these messages are there."""
        return bool(self._store.check(self._names(keys)))

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys that are not there."""
        return absent(self.are_there, keys)

    def wait(self, keys: Sequence[str], pace: Pace, limits: Limits) -> bool:
        """Wait until all keys are there; False once the limits are reached."""
        return bool(_looked_for(partial(self._store.check, self._names(keys)), pace, limits))

    def wait_to_hear(self, key: str, pace: Pace, limits: Limits) -> Json | None:
        """Wait for one message and return it; None once the limits are reached."""
        words = _looked_for(partial(self._heard, self._prefix + key), pace, limits)
        return json.loads(words) if words else None

    def _heard(self, name: str) -> bytes:
        """A message, or nothing if it is not there: in one request, where ``get`` takes two."""
        words: bytes = self._store.compare_set(name, _NOTHING, _NOTHING)
        return b"" if words == _NOTHING.encode() else words

    def _names(self, keys: Iterable[str]) -> list[str]:
        return [self._prefix + key for key in keys]


def _looked_for(look: Callable[[], T], pace: Pace, limits: Limits) -> T:
    """What ``look`` finds once it finds anything, or at last."""
    began_s = time.monotonic()
    if pace.looks_at_once and (found := look()):
        return found
    while True:
        now_s = time.monotonic()
        left_s = limits.since_s + limits.patience_s() - now_s
        if left_s > 0:
            time.sleep(min(pace.pause_s(now_s - began_s), left_s))
        if found := look():
            pace.took(time.monotonic() - began_s)
            return found
        if left_s <= 0 or not limits.is_wanted():
            return found


def absent(are_there: Callable[[list[str]], bool], keys: Sequence[str]) -> list[str]:
    """The keys that are not there, found by halving: few questions if few are absent."""
    if not keys or are_there([*keys]):
        return []
    if len(keys) == 1:
        return [*keys]
    middle = len(keys) // 2
    return [*absent(are_there, keys[:middle]), *absent(are_there, keys[middle:])]
