"""A restart in parts, from the marks that a training leaves. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: The parts in order, and the mark with which each ends; the first begins with the SIGKILL.
PARTS = {
    "interpreter": "script",
    "import torch": "torch",
    "import checkfreq": "checkfreq",
    "import iterators": "iterators",
    "model and loader": "built",
    "manager": "manager",
    "restore": "restored",
    "first batch": "batch",
    "first update": "update",
}
LAST = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Seconds from the SIGKILL of a training to the end of the first update after it, in parts.

    ``held_s``: how long each checkpoint of the new process held training, the first one first.
    ``calls``: seconds within functions of ours, parts of the parts.
    """

    parts: Mapping[str, float]
    calls: Mapping[str, float]
    held_s: Sequence[float]

    @property
    def seconds(self) -> float:
        """The whole."""
        return sum(self.parts.values())

    @property
    def first_hold(self) -> float | None:
        """How long the first checkpoint held training, divided by the median of the others."""
        if len(self.held_s) < 2:
            return None
        return self.held_s[0] / max(statistics.median(self.held_s[1:]), 1e-9)


def restart_of(
    marks: Sequence[Mapping[str, Any]], *, killed_s: float, held_s: Sequence[float]
) -> Restart:
    """From the marks of one process; raises KeyError if one is missing.

    ``killed_s`` and the marks are of one clock.
    """
    at_s = {mark["mark"]: mark["at_s"] for mark in marks}
    parts, before_s = {}, killed_s
    for name, mark in PARTS.items():
        parts[name] = at_s[mark] - before_s
        before_s = at_s[mark]
    calls = next(mark["calls"] for mark in marks if mark["mark"] == LAST) or {}
    return Restart(parts=parts, calls=calls, held_s=held_s)


def medians(found: Sequence[Mapping[str, float]], *, digits: int = 4) -> dict[str, float]:
    """The median of each name over those that have it."""
    names = list(dict.fromkeys(name for one in found for name in one))
    return {
        name: round(statistics.median(one[name] for one in found if name in one), digits)
        for name in names
    }
