"""What a simulated run came to. Seconds of simulated wall-clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Taken:
    """A checkpoint was started; ``interval_steps`` is what was planned then (None: no plan yet)."""

    step: int
    start_s: float
    interval_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Every second is counted once: wall = progress + overhead + lost + down.

    progress_s: work that ended up in the result, at the speed of iterations without checkpoints.
    overhead_s: added by checkpoints, held and slowed down, also where the work was lost later.
    lost_s: work done since the newest durable checkpoint when a failure struck.
    down_s: restarts.
    excess_s: the most that overhead ever was above the bound (``max_overhead`` of all work done
        so far); 0 or more.
    largest_cost_s, exempt_s: of the checkpoints the dearest; and those together that the bound
        does not cover: the first of each start, and the last before a preemption.
    planned_steps: the interval planned in the end; None: no plan yet.
    num_deferred, num_withheld, taken: of all starts together where the run was stepped through;
        where one start was replayed (nothing varies: run.py), of that one, as far as it was run.
    """

    wall_s: float
    progress_s: float
    overhead_s: float
    lost_s: float
    down_s: float
    excess_s: float
    largest_cost_s: float
    exempt_s: float
    num_iterations: int
    num_failures: int
    num_checkpoints: int
    num_deferred: int
    num_withheld: int
    taken: tuple[Taken, ...]
    planned_steps: int | None

    @property
    def goodput(self) -> float:
        """The part of the time that ended up as progress."""
        return self.progress_s / self.wall_s

    @property
    def overhead(self) -> float:
        """Added by checkpoints, a fraction of the work done."""
        return self.overhead_s / (self.progress_s + self.lost_s)
