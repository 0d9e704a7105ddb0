"""An AUTO manager after its warm-up: it has an interval, and has taken a few checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.lab.paired import LiveManager, passed
from benchmarks.lab.training import Loop
from checkfreq import CFManager

CHECKPOINTS = 6
_PATIENCE_S = 120.0


def warmed_up(loop: Loop, manager: CFManager, *, at_most_s: float) -> LiveManager:
    """Train until `CHECKPOINTS` are committed, or there is an interval after ``at_most_s``.

    Ends the process if there is still no interval long after that.
    """
    live = LiveManager(loop, manager)
    try:
        live.stretch(is_warmed_up(manager, at_most_s=at_most_s))
    except SystemExit:
        live.close()
        raise
    return live


def is_warmed_up(manager: CFManager, *, at_most_s: float) -> Callable[[], bool]:
    """Returns a function: whether the warm-up is over."""
    is_late, is_too_late = passed(at_most_s), passed(at_most_s + _PATIENCE_S)

    def warmed_up() -> bool:
        stats = manager.stats()
        if stats["interval_steps"] is None:
            if is_too_late():
                raise SystemExit(f"AUTO chose no interval in {at_most_s + _PATIENCE_S:.0f} s")
            return False
        return stats["num_committed"] >= CHECKPOINTS or is_late()

    return warmed_up
