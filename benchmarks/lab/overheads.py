"""The overhead of one interval, from rounds of paired windows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.lab.estimate import Estimate, estimate, undisturbed
from benchmarks.lab.paired import Round

#: Of an interval's checkpoints, taken when due; with fewer it is really a longer interval.
_MOSTLY = 0.95


@dataclass(frozen=True, slots=True)
class Measured:
    """Overhead of one interval in paired windows; ``taken`` of the checkpoints that were due."""

    estimate: Estimate
    estimate_all: Estimate
    num_rounds: int
    num_left_out: int
    iteration_s: float
    foreign: float
    taken: float | None
    seconds: float

    @property
    def is_taken(self) -> bool:
        """Whether (nearly) every checkpoint was taken when it was due, as far as that is known."""
        return self.taken is None or self.taken >= _MOSTLY

    @classmethod
    def of(cls, name: str, done: list[Round], *, seconds: float, taken: float | None) -> Measured:
        """What the rounds say of one arm."""
        kept = undisturbed_rounds(done)
        return cls(
            estimate=estimate_of(name, kept),
            estimate_all=estimate_of(name, done),
            num_rounds=len(done),
            num_left_out=len(done) - len(kept),
            iteration_s=statistics.median(each.iteration_s for each in kept),
            foreign=statistics.median(each.foreign for each in kept),
            taken=taken,
            seconds=seconds,
        )


def estimate_of(name: str, done: list[Round]) -> Estimate:
    return estimate([each.samples[name] for each in done])


def undisturbed_rounds(done: list[Round]) -> list[Round]:
    """Those in which others used no more of the CPU than usual."""
    keep = undisturbed([each.foreign for each in done])
    return [each for each, is_kept in zip(done, keep, strict=True) if is_kept]
