"""Rounds in which arms alternate, so that a disturbance of the machine affects all of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

#: Runs once; returns seconds by name.
Arm = Callable[[], dict[str, float]]
Seconds = dict[str, list[float]]


def interleaved(arms: Sequence[Arm], *, rounds: int) -> Seconds:
    """Run all arms once per round, in random order; returns a value per round and name."""
    seconds: Seconds = {}
    shuffled, order = list(arms), random.Random(0)
    for _ in range(rounds):
        order.shuffle(shuffled)
        for arm in shuffled:
            for name, value in arm().items():
                seconds.setdefault(name, []).append(value)
    return seconds
