"""An AUTO manager that has made up its mind: planned, and taken a few checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.lab.paired import LiveManager, passed
from benchmarks.lab.training import Loop
from checkfreq import CFManager

CHECKPOINTS = 6
_PATIENCE_S = 120.0


def settled(loop: Loop, manager: CFManager, *, at_most_s: float) -> LiveManager:
    """Train until `CHECKPOINTS` are committed, or there is a plan and ``at_most_s`` are over.

    Ends the process where there is no plan long after that.
    """
    live = LiveManager(loop, manager)
    try:
        live.stretch(is_settled(manager, at_most_s=at_most_s))
    except SystemExit:
        live.close()
        raise
    return live


def is_settled(manager: CFManager, *, at_most_s: float) -> Callable[[], bool]:
    """Whether that is so by now."""
    is_late, is_too_late = passed(at_most_s), passed(at_most_s + _PATIENCE_S)

    def settled() -> bool:
        stats = manager.stats()
        if stats["interval_steps"] is None:
            if is_too_late():
                raise SystemExit(f"AUTO made no plan in {at_most_s + _PATIENCE_S:.0f} s")
            return False
        return stats["num_committed"] >= CHECKPOINTS or is_late()

    return settled
