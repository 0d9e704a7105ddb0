"""Plays a run to a tuner: iterations of given lengths, checkpoints of given costs.

What checkpoints and boundaries truly added is kept beside what the tuner makes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from checkfreq.policy.profile import Profile
from checkfreq.policy.tuner import Iteration, Measured, RateTuner, Verdict

#: What an earlier run measured.
CACHED = Profile(
    iteration_s=1.0,
    overlap_s=0.5,
    host_copy_s=0.25,
    persist_s=0.5,
    durable_s=0.75,
    cost_s=0.5,
    cost_upper_s=0.75,
    state_bytes=1000,
)


@dataclass(slots=True, kw_only=True)
class Costs:
    """Costs of a checkpoint that holds training for ``stall_s`` and is durable after ``durable_s``.

    ``slowdown`` is what each of its iterations takes longer, a fraction of T; ``slow_s`` what its
    first takes longer besides, though it is not held.
    """

    stall_s: float = 0.5
    copy_s: float = 0.25
    durable_s: float = 0.75
    slowdown: float = 0.0
    slow_s: float = 0.0
    state_bytes: int = 1000
    device_copy_s: float | None = None

    @property
    def measured(self) -> Measured:
        return Measured(
            copy_s=self.copy_s,
            persist_s=self.durable_s - self.copy_s,
            durable_s=self.durable_s,
            state_bytes=self.state_bytes,
            device_copy_s=self.device_copy_s,
        )


@dataclass(slots=True)
class Run:
    """Iterations of ``iteration_s`` and what the tuner says at the boundary after each.

    ``boundary_s`` is what every boundary holds training for. ``taken`` are the steps of periodic
    checkpoints, ``told`` how often each answer came. ``true_s`` is what iterations took longer
    than ``clean_s``, the time without any of it; ``costs_s`` the part of each checkpoint, by name.
    With ``meeting_s`` it is a run of many ranks, which ask the tuner only where they meet: ``met``
    are those steps.
    """

    tuner: RateTuner
    costs: Costs = field(default_factory=Costs)
    iteration_s: float = 1.0
    boundary_s: float = 0.0
    step: int = 0
    now_s: float = 0.0
    never_ends: bool = False
    fails: bool = False
    taken: list[int] = field(default_factory=list)
    told: Counter[Verdict] = field(default_factory=Counter)
    stall_s: float = 0.0
    slow_s: float = 0.0
    in_flight: dict[str, tuple[float, Costs, bool]] = field(default_factory=dict)
    name: int = 0
    true_s: float = 0.0
    clean_s: float = 0.0
    costs_s: dict[str, float] = field(default_factory=dict)
    meeting_s: float = 0.0
    every_s: float = 1.0
    met: list[int] = field(default_factory=list)
    meets_at: int = 0
    held_s: float = 0.0

    @property
    def true_overhead(self) -> float:
        """As a fraction of the time without checkpoints."""
        return self.true_s / self.clean_s

    def take(self, *, is_periodic: bool) -> None:
        """Begin a checkpoint at this boundary; it holds up the next iteration."""
        self.name += 1
        name = str(self.name)
        self.tuner.started(name, step=self.step, start_s=self.now_s, is_periodic=is_periodic)
        end_s = float("inf") if self.never_ends else self.now_s + self.costs.durable_s
        self.in_flight[name] = (end_s, self.costs, self.fails)
        self.stall_s += self.costs.stall_s
        self.slow_s += self.costs.slow_s
        self.costs_s[name] = self.costs.stall_s + self.costs.slow_s

    def iterate(self, *, extra_s: float = 0.0, is_regular: bool = True) -> None:
        """One iteration, and the checkpoints that end in it."""
        for name, (_, costs, _) in self.in_flight.items():
            self.slow_s += self.iteration_s * costs.slowdown
            self.costs_s[name] += self.iteration_s * costs.slowdown
        self.stall_s += self.boundary_s
        clean_s = self.iteration_s + extra_s
        duration_s = clean_s + self.stall_s + self.slow_s + self.held_s
        self.clean_s += clean_s
        self.true_s += duration_s - clean_s
        start_s, self.now_s = self.now_s, self.now_s + duration_s
        for name, (end_s, costs, fails) in list(self.in_flight.items()):
            if end_s <= self.now_s:
                del self.in_flight[name]
                self.tuner.ended(name, end_s=end_s, measured=None if fails else costs.measured)
        self.tuner.iteration(
            Iteration(
                start_s,
                self.now_s,
                stall_s=self.stall_s,
                overlap_s=0.5 * self.iteration_s,
                is_regular=is_regular,
                met_s=self.held_s,
            )
        )
        self.stall_s = self.slow_s = self.held_s = 0.0
        self.step += 1

    def decide(self) -> Verdict:
        """Ask the tuner at this boundary, and begin a checkpoint if it says so."""
        if self.meeting_s and self.step < self.meets_at:
            return Verdict.NOT_YET
        due = self.tuner.due(step=self.step, now_s=self.now_s)
        self.told[due] += 1
        if due is Verdict.TAKE:
            self.taken.append(self.step)
            self.take(is_periodic=True)
        if self.meeting_s:
            self._meet()
        return due

    def _meet(self) -> None:
        since_last = self.step - self.met[-1] if self.met else 0
        self.held_s = self.meeting_s
        self.tuner.met(self.meeting_s)
        self.met.append(self.step)
        self.meets_at = self.step + self.tuner.steps_to_meeting(
            due_steps=self.tuner.next_due_step(self.step) - self.step,
            iteration_s=self.iteration_s,
            every_s=self.every_s,
            since_last=since_last,
        )

    def play(self, steps: int, *, extra_s: Callable[[int], float] | None = None) -> list[int]:
        """Run ``steps`` iterations; returns the steps of the checkpoints taken meanwhile."""
        before = len(self.taken)
        for _ in range(steps):
            self.iterate(extra_s=extra_s(self.step) if extra_s else 0.0)
            self.decide()
        return self.taken[before:]
