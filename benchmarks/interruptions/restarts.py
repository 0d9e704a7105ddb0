"""When a training is interrupted, what its restarts cost, and the names of its arms. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: The arms that are never interrupted; the others are compared with the first.
BASE, UNINTERRUPTED = "uninterrupted, no checkpoints", "uninterrupted, auto"

#: What `imagenet --history` says of an update: ``step``, ``time_unix_s``, ``loss``.
Update = Mapping[str, Any]


def schedule(first_s: float, every_s: float) -> Iterator[float]:
    """Seconds from the first start to each interruption, endlessly."""
    return (first_s + number * every_s for number in itertools.count())


def redone(steps: Sequence[int]) -> int:
    """The number of updates that were made again."""
    return len(steps) - len(set(steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Seconds from the start of a process to the end of its first update, in three parts.

    ``startup_s``: until all is imported, the data opened and the model made. ``restore_s``: from
    there until the checkpoint is applied, the start of the persist worker included; None where
    there was no checkpoint yet. ``first_update_s``: the rest, the first batch's loading included.
    """

    startup_s: float
    restore_s: float | None
    first_update_s: float

    @property
    def resume_s(self) -> float:
        """The whole time."""
        return self.startup_s + (self.restore_s or 0.0) + self.first_update_s


def restarts(
    starts_s: Sequence[float],
    *,
    ready_s: Sequence[float],
    restored_s: Sequence[float],
    updated_s: Sequence[float],
) -> list[Restart]:
    """Every restart that reached an update, from the times of events, without the first start.

    All times are of one clock. A process lives until the next one starts.
    """
    found = []
    lives = itertools.pairwise([*starts_s, float("inf")])
    for start_s, end_s in itertools.islice(lives, 1, None):
        ready, restored, updated = (
            _first_within(times_s, start_s, end_s) for times_s in (ready_s, restored_s, updated_s)
        )
        if ready is not None and updated is not None:
            found.append(
                Restart(
                    startup_s=ready - start_s,
                    restore_s=None if restored is None else restored - ready,
                    first_update_s=updated - (ready if restored is None else restored),
                )
            )
    return found


def _first_within(times_s: Sequence[float], start_s: float, end_s: float) -> float | None:
    return next((time_s for time_s in times_s if start_s <= time_s < end_s), None)


def median(values: Sequence[float | None]) -> float | None:
    """The median of the known values, to a millisecond; None without any."""
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 3) if known else None


def differing(updates: Sequence[Update], reference: Sequence[Update]) -> int:
    """Updates, redone ones included, whose loss differs from the reference's at that step.

    A step that only one of the two made counts too.
    """
    losses = {update["step"]: update["loss"] for update in reference}
    missing = losses.keys() - {update["step"] for update in updates}
    others = [update for update in updates if losses.get(update["step"]) != update["loss"]]
    return len(others) + len(missing)


def thinned(
    updates: Sequence[Update], *, start_unix_s: float, most: int = 200
) -> list[list[float]]:
    """[seconds since the start, step, loss] of ``most`` updates, the first and last among them."""
    count = min(most, len(updates))
    places = {round(n * (len(updates) - 1) / max(1, count - 1)) for n in range(count)}
    return [
        [round(at["time_unix_s"] - start_unix_s, 3), at["step"], at["loss"]]
        for at in (updates[place] for place in sorted(places))
    ]
