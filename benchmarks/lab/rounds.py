"""Rounds in which arms take turns, so that what disturbs a shared machine disturbs all alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

#: Seconds by the name of what was timed.
Arm = Callable[[], dict[str, float]]
Seconds = dict[str, list[float]]


def interleaved(arms: Sequence[Arm], *, rounds: int) -> Seconds:
    """Run all arms once a round, in random order; a value per round and name."""
    seconds: Seconds = {}
    shuffled, order = list(arms), random.Random(0)
    for _ in range(rounds):
        order.shuffle(shuffled)
        for arm in shuffled:
            for name, value in arm().items():
                seconds.setdefault(name, []).append(value)
    return seconds
