"""Figures derived from measured costs. Pure; times in seconds.

A failure is equally likely at any time of an interval, so on average it loses half an interval of
training, and what was trained until the newest checkpoint was durable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def recovery_s(*, restore_s: float, steps: int, iteration_s: float, durable_s: float) -> float:
    """From a failure until training is where it was: restore, and train the lost part again.

    ``steps`` between checkpoints; ``durable_s`` from a boundary until its checkpoint is durable.
    """
    return restore_s + steps / 2 * iteration_s + durable_s


@dataclass(frozen=True, slots=True)
class Stall:
    """The cost of one checkpoint, in three parts that add up to it.

    At the boundary (the state is captured), at the weight update (which waits for the copy), and
    the slowdown of the rest of training while copy and write run beside it. The last part is a
    difference of noisy figures, and can be below zero.
    """

    boundary_s: float
    wait_s: float
    rest_s: float

    @classmethod
    def of(cls, *, cost_s: float, held_s: float, wait_s: float) -> Stall:
        """``held_s``: boundary and update together."""
        return cls(held_s - wait_s, wait_s, cost_s - held_s)


def allowed_by_storage(limit: float) -> float:
    """The longest interval within 1.1 of the storage ``limit``, in whole iterations."""
    return max(math.ceil(limit), 1.1 * limit)


def affordable_interval_s(bound: float, *, cost_s: float, durable_s: float) -> float:
    """Seconds between checkpoints that together cost ``bound`` of the training time.

    A checkpoint starts only when the one before is durable.
    """
    return max(cost_s / bound, durable_s)


def expected_loss_s(interval_s: float, *, durable_s: float) -> float:
    """Training time that a failure loses on average: half an interval, and what was in flight."""
    return interval_s / 2 + durable_s
