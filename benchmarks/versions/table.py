"""The table of `benchmarks.versions`."""

from __future__ import annotations

from benchmarks.lab.tables import Line, Table, row


def versions(lines: list[Line]) -> str:
    """A row per Python, a column per torch; in each place the newest result."""
    found = {(_python(line), _torch(line)): line for line in lines}
    if not found:
        return ""
    pythons, torches = (sorted({pair[part] for pair in found}, key=_number) for part in (0, 1))
    rows = [
        row("tests passed", *(f"torch {torch}" for torch in torches)),
        f"|{'---|' * (1 + len(torches))}",
        *(
            row(f"Python {python}", *(_cell(found.get((python, torch))) for torch in torches))
            for python in pythons
        ),
    ]
    return "\n".join([*rows, ""])


def _cell(line: Line | None) -> str:
    if line is None:
        return "-"
    num_failed = len(line["failed"])
    passed = f"{line['passed']:,}"
    return passed if num_failed == 0 else f"{passed}, {num_failed} failed"


def _python(line: Line) -> str:
    return ".".join(line["versions"]["python"].split(".")[:2])


def _torch(line: Line) -> str:
    return ".".join(line["versions"]["torch"].split(".")[:2])


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


TABLES = {"versions": Table("versions", versions)}
