"""What ranks cost one another, by their number: from measured points, in lines of JSON.

A line has ``what``, ``ranks`` and ``seconds``; ``what`` is one of

* ``meeting``: holds training at a boundary at which the ranks meet;
* ``commit``: of the leader, after all parts are written; a checkpoint is durable so much later;
* ``restore``: reading the records of a checkpoint and planning who reads what.

``origin`` (or ``commit``, ``command`` and ``machine`` of a benchmark's result line) says where it
was measured. Other fields are ignored, and so are lines without ``seconds``. A cost without points
counts as nothing. rank_costs.jsonl has the points that come with the package;
``python -m benchmarks.ranks.points`` makes it from the committed result lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from checkfreq.errors import ConfigError
from checkfreq.policy.meeting_schedule import MeetingSchedule
from checkfreq.simulation.fitting import Fit, Point, fitted

COSTS = ("meeting", "commit", "restore")
#: CFConfig.meet_every_s.
_MEET_EVERY_S = 1.0
#: Meetings until their distance, which at most doubles, is the one that stays.
_SETTLED = 24


@dataclass(frozen=True, slots=True)
class RankCosts:
    """The functions by name (`COSTS`); what is missing costs nothing."""

    fits: Mapping[str, Fit]

    def seconds(self, what: str, ranks: int) -> float:
        """A cost at a number of ranks; nothing at one, which is alone."""
        fit = self.fits.get(what)
        return fit.at(ranks) if fit is not None and ranks > 1 else 0.0

    def boundary_s(
        self, ranks: int, *, iteration_s: float, interval_steps: int, max_overhead: float
    ) -> float:
        """What meetings add to an iteration, on average, with the schedule of a real run."""
        meeting_s = self.seconds("meeting", ranks)
        if not meeting_s:
            return 0.0
        schedule = MeetingSchedule()
        schedule.met(meeting_s)
        steps = 1
        for _ in range(_SETTLED):
            steps = schedule.steps(
                due_steps=interval_steps,
                iteration_s=iteration_s,
                every_s=_MEET_EVERY_S,
                since_last=steps,
                bound=max_overhead,
            )
        return meeting_s / steps


#: Ranks that cost one another nothing.
FREE = RankCosts({})


def default_rank_costs() -> RankCosts:
    """From the points that come with the package."""
    found = files("checkfreq.simulation").joinpath("rank_costs.jsonl")
    return rank_costs(found.read_text(encoding="utf-8"), name="rank_costs.jsonl")


def read_rank_costs(path: Path) -> RankCosts:
    """From a file; ConfigError if it cannot be read or has no points."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected lines of JSON with measured points: {error}") from None
    return rank_costs(text, name=str(path))


def rank_costs(text: str, *, name: str) -> RankCosts:
    """From lines of JSON; ``name`` is that of the file, for errors."""
    points: dict[str, list[Point]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for what, point in _points_in(line, where=f"{name}, line {number}"):
            points.setdefault(what, []).append(point)
    if not points:
        raise ConfigError(f"{name}: expected lines with what, ranks and seconds, found none")
    return RankCosts({what: fitted(points[what]) for what in COSTS if what in points})


def _points_in(line: str, *, where: str) -> Iterator[tuple[str, Point]]:
    if not line.strip():
        return
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected an object in JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: expected an object in JSON")
    if "seconds" not in found:
        return
    what = found.get("what")
    if what not in COSTS:
        raise ConfigError(f"{where}: expected what to be one of {', '.join(COSTS)}, got {what!r}")
    try:
        yield what, Point(found.get("ranks"), found["seconds"], _origin(found))  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _origin(found: Mapping[str, Any]) -> str:
    """``python -m benchmarks.ranks, commit 39bad1a, 2 cores``."""
    if isinstance(found.get("origin"), str):
        return str(found["origin"])
    machine = found.get("machine")
    cores = machine.get("cores") if isinstance(machine, dict) else None
    commit = found.get("commit")
    parts = [found.get("command"), commit and f"commit {commit}", cores and f"{cores} cores"]
    return ", ".join(str(part) for part in parts if part)
