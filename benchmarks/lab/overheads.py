"""The overhead of one interval, from rounds of paired windows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.lab.estimate import Estimate, estimate, undisturbed
from benchmarks.lab.paired import Round

#: The share of checkpoints taken when due; below it the interval is in fact a longer one.
_MOSTLY = 0.95


@dataclass(frozen=True, slots=True)
class Measured:
    """The overhead of one interval in paired windows; ``taken``: the share of due checkpoints."""

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
        """Whether (nearly) every due checkpoint was taken, as far as that is known."""
        return self.taken is None or self.taken >= _MOSTLY

    @classmethod
    def of(cls, name: str, done: list[Round], *, seconds: float, taken: float | None) -> Measured:
        """The overhead of one arm, from its rounds."""
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
    """The overhead of one arm over all of these rounds."""
    return estimate([each.samples[name] for each in done])


def undisturbed_rounds(done: list[Round]) -> list[Round]:
    """The rounds in which other processes used no more of the CPU than usual."""
    keep = undisturbed([each.foreign for each in done])
    return [each for each, is_kept in zip(done, keep, strict=True) if is_kept]
