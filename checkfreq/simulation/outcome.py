"""The outcome of a simulated run, in seconds of simulated wall-clock time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Taken:
    """A checkpoint that was started; ``interval_steps`` was planned then (None: no plan yet)."""

    step: int
    start_s: float
    interval_steps: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Every second is counted once: wall = progress + overhead + lost + down.

    progress_s: work that ended up in the result, at the speed of iterations without checkpoints.
    overhead_s: time added by checkpoints (stalls and slowdown), also to work that was lost later.
    lost_s: work lost to failures, that is, done since the newest durable checkpoint.
    down_s: restarts.
    excess_s: the most by which overhead ever exceeded the bound (``max_overhead`` of all work done
        so far); 0 or more.
    window_excess_s: the same within ``WINDOW_ITERATIONS`` in a row (windows.py), and without the
        checkpoints that the bound does not cover.
    largest_cost_s: the cost of the most expensive checkpoint.
    exempt_s: the total cost of checkpoints that the bound does not cover: the first of each start,
        and the last before a preemption.
    planned_steps: the interval planned at the end; None: no plan yet.
    window_excess_s, num_deferred, num_withheld, taken: over all starts if the run was stepped
        through; if one start was replayed (run.py), those of that start, as far as it was run.
    """

    wall_s: float
    progress_s: float
    overhead_s: float
    lost_s: float
    down_s: float
    excess_s: float
    window_excess_s: float
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
        """The fraction of the time that ended up as progress."""
        return self.progress_s / self.wall_s

    @property
    def overhead(self) -> float:
        """Time added by checkpoints, as a fraction of the work done."""
        return self.overhead_s / (self.progress_s + self.lost_s)
