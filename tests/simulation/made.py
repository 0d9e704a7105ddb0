"""Traces as a run writes them, of iterations and checkpoints whose costs are known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from checkfreq.pacing.trace import NAME, TraceLog
from checkfreq.policy.observations import Iteration, Measured
from checkfreq.store.fileops import LocalFileOps

HEADER = {"from_step": 0, "max_overhead": 0.035, "objective": "bound", "num_slots": 2}


class Clock:
    def __init__(self) -> None:
        self.now_s = 5000.0

    def __call__(self) -> float:
        return self.now_s


def write_trace(
    folder: Path,
    work_s: Sequence[float],
    *,
    at: Collection[int] = (),
    held_s: float = 0.004,
    slowed_s: Sequence[float] = (0.003, 0.002),
    durable_s: float = 0.15,
    boundary_s: float = 1e-5,
    failed: Collection[int] = (),
    scale: Callable[[int], float] = lambda at: 1.0,
    **header: object,
) -> Path:
    """A run with a checkpoint before each of the iterations ``at``; returns its trace.

    A checkpoint holds its first iteration for ``held_s``, makes it and those after it longer by
    ``slowed_s``, and is durable after ``durable_s``; all that times ``scale`` of its iteration.
    """
    clock = Clock()
    log = TraceLog(folder / NAME, LocalFileOps(folder, direct=False), clock=clock)
    log.begin(**{**HEADER, **header})
    extra_s = [0.0] * (len(work_s) + len(slowed_s))
    flying: list[tuple[str, float]] = []
    for number, took_s in enumerate(work_s):
        start_s, held = clock.now_s, boundary_s
        if number in at:
            log.started(
                f"{number}", step=number + 1, start_s=start_s, reason="periodic", planned=10
            )
            flying.append((f"{number}", start_s + durable_s * scale(number)))
            held += held_s * scale(number)
            for age, more_s in enumerate(slowed_s):
                extra_s[number + age] += more_s * scale(number)
        clock.now_s += held + took_s + extra_s[number]
        for name, end_s in [each for each in flying if each[1] <= clock.now_s]:
            flying.remove((name, end_s))
            lasted_s = durable_s * scale(int(name))
            done = Measured(copy_s=0.01, persist_s=lasted_s - 0.01, durable_s=0.0, state_bytes=4096)
            measured = None if int(name) in failed else done
            log.ended(name, end_s=end_s, stall_s=held_s * scale(int(name)), measured=measured)
        log.add(Iteration(start_s, clock.now_s, held, is_quiet=not flying), counts=True)
    log.write()
    return folder / NAME
