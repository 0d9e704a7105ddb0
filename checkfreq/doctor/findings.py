"""One thing that was looked at: what was found, what it means, how to mend it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from checkfreq.errors import printable
from checkfreq.types import Json


class Status(Enum):
    """How good it is, from the best to the worst; nobody looked at what is UNKNOWN."""

    GOOD = "ok"
    NOTE = "note"
    UNKNOWN = "not tried"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """``name``: stable, for programs. ``mend``: what to do; "" if there is nothing to do.

    figures: the same in numbers, as JSON-able values.
    """

    name: str
    status: Status
    found: str
    means: str
    mend: str = ""
    figures: Mapping[str, Json] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        """One JSON object."""
        return {
            "name": self.name,
            "status": self.status.value,
            "found": self.found,
            "means": self.means,
            "mend": self.mend,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True, slots=True)
class Section:
    """The findings on one subject."""

    name: str
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Json]:
        """One JSON object."""
        return {"section": self.name, "findings": [one.to_json() for one in self.findings]}


def section(name: str, *checks: Callable[[], Iterable[Finding]]) -> Section:
    """Run the checks of a section. One that fails is a finding too, and the others go on."""
    return Section(name, tuple(one for check in checks for one in _guarded(name, check)))


def worst(sections: Iterable[Section]) -> Status:
    """The worst of all findings; GOOD if there are none."""
    order = list(Status)
    found = (one.status for one in (f for section in sections for f in section.findings))
    return max(found, key=order.index, default=Status.GOOD)


def _guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:  # whatever is broken here must not hide the rest
        yield Finding(
            getattr(check, "__name__", name).strip("_"),
            Status.UNKNOWN,
            printable(f"{type(error).__name__}: {error}"),
            "This could not be found out; the other findings stand.",
            "If this should have worked, send the page (--page FILE) with a bug report.",
        )
