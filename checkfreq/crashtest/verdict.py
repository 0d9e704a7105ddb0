"""What a crash test has found, as text and as data."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from checkfreq.crashtest.causes import Cause
from checkfreq.crashtest.compare import Difference

_MOST_ITEMS = 5


class Outcome(enum.Enum):
    """How it ended."""

    EXACT = "resumes exactly"
    DIFFERS = "does not resume exactly"
    FAILED = "does not resume"
    NOT_DETERMINISTIC = "is not deterministic"


@dataclass(frozen=True, slots=True)
class Death:
    """One kill: the step that was reached, how, and the step that the next life went on from."""

    step: int
    how: str
    restored: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """``causes``: the likeliest first. ``seconds``: how long the whole crash test took."""

    outcome: Outcome
    num_steps: int
    ranks: int
    seed: int
    deaths: tuple[Death, ...] = ()
    difference: Difference | None = None
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def status(self) -> int:
        """The exit status."""
        return 0 if self.outcome is Outcome.EXACT else 1

    def lines(self) -> Iterator[str]:
        """For people."""
        for death in self.deaths:
            went_on = "" if death.restored is None else f", went on from step {death.restored}"
            yield f"killed after step {death.step} ({death.how}){went_on}"
        yield from self.notes
        yield f"{self.outcome.value}{self._summary()}"
        if self.difference is not None:
            yield from self._difference(self.difference)
        for number, cause in enumerate(self.causes[:3]):
            yield f"  {'likely cause' if number == 0 else 'or'}: {cause.text}"
            if cause.remedy:
                yield f"    {cause.remedy}"

    def _summary(self) -> str:
        ranks = "" if self.ranks == 1 else f", {self.ranks} ranks"
        kills = "1 kill" if len(self.deaths) == 1 else f"{len(self.deaths)} kills"
        return f": {self.num_steps} steps, {kills}{ranks} (seed {self.seed})"

    def _difference(self, one: Difference) -> Iterator[str]:
        rank = "" if self.ranks == 1 else f" of rank {one.rank}"
        since = f", after restoring step {one.restored}" if self.deaths else ""
        yield f"  first difference: step {one.step}{rank}{since}: {one.first}"
        for item in one.items[1:_MOST_ITEMS]:
            yield f"    {item}"
        if len(one.items) > _MOST_ITEMS:
            yield f"    and {len(one.items) - _MOST_ITEMS} more"

    def json(self) -> dict[str, object]:
        """For programs."""
        one = self.difference
        return {
            "outcome": self.outcome.name.lower(),
            "num_steps": self.num_steps,
            "ranks": self.ranks,
            "seed": self.seed,
            "kills": [
                {"step": death.step, "how": death.how, "restored_step": death.restored}
                for death in self.deaths
            ],
            "difference": one
            and {
                "rank": one.rank,
                "restored_step": one.restored,
                "step": one.step,
                "items": [
                    {
                        "what": item.what.value,
                        "name": item.name,
                        "expected": item.expected,
                        "found": item.found,
                    }
                    for item in one.items
                ],
            },
            "causes": [
                {"name": cause.name, "text": cause.text, "remedy": cause.remedy}
                for cause in self.causes
            ],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 1),
        }
