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
from typing import Any

from checkfreq.types import Json

_SHORTEST_PAUSE_S = 5e-5
#: The longest pause: however many ranks there are, while they wait for one that is late they look
#: at the store at most so often together, as long as a stop signal is noticed in time.
_LONGEST_PAUSE_S, _MOST_LOOKS_PER_S, _NOTICED_S = 0.05, 2000.0, 0.5
#: The first look comes after half of the shortest of so many last waits, but no later than that.
#: With up to so many ranks, looks cost the store little, and come at once.
_WINDOW, _FIRST_LOOK_S, _FEW = 8, 0.01, 17


class Pace:
    """When to look for what one waits for, meeting after meeting. Seconds."""

    def __init__(self, world: int) -> None:
        longest_s = max(_LONGEST_PAUSE_S, world / _MOST_LOOKS_PER_S)
        self._longest_s = min(longest_s, _NOTICED_S)
        self.looks_at_once = world <= _FEW
        self._latest_s = 0.0 if self.looks_at_once else _FIRST_LOOK_S
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def pause_s(self, waited_s: float) -> float:
        """How long to pause before the next look, having waited so long.

        A quarter of that, so that no wait becomes much longer than necessary; and of many ranks,
        not before it can be over, since a look takes the store as long as a message.
        """
        first_s = min(min(self._last, default=0.0) / 2, self._latest_s)
        pause_s = max(waited_s / 4, first_s - waited_s, _SHORTEST_PAUSE_S)
        return min(pause_s, self._longest_s)

    def took(self, seconds: float) -> None:
        """A wait was over after that."""
        self._last.append(seconds)


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

    def wait(
        self,
        keys: Sequence[str],
        pace: Pace,
        *,
        since_s: float,
        patience_s: Callable[[], float],
        is_wanted: Callable[[], bool],
    ) -> bool:
        """Wait until all keys are there; False once ``patience_s()`` has passed ``since_s``, on
        the monotonic clock, or once the wait is not wanted any more.
        """
        names, began_s = self._names(keys), time.monotonic()
        if pace.looks_at_once and self._store.check(names):
            return True
        while True:
            now_s = time.monotonic()
            left_s = since_s + patience_s() - now_s
            if left_s > 0:
                time.sleep(min(pace.pause_s(now_s - began_s), left_s))
            if self._store.check(names):
                pace.took(time.monotonic() - began_s)
                return True
            if left_s <= 0 or not is_wanted():
                return False

    def _names(self, keys: Iterable[str]) -> list[str]:
        return [self._prefix + key for key in keys]


def absent(are_there: Callable[[list[str]], bool], keys: Sequence[str]) -> list[str]:
    """The keys that are not there, found by halving: few questions if few are absent."""
    if not keys or are_there([*keys]):
        return []
    if len(keys) == 1:
        return [*keys]
    middle = len(keys) // 2
    return [*absent(are_there, keys[:middle]), *absent(are_there, keys[middle:])]
